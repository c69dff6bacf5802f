"""GGUF metadata of the wrong kind, and more layers than there are: refused by name, never an exception of Python's."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import write_llama_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.errors import ModelError
from octavo.models.gguf import end_ids
from octavo.models.gguf_file import read_gguf
from octavo.models.load import load_checkpoint

UINT32, STRING, ARRAY, INT64 = 4, 8, 9, 11


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_llama_gguf(path, LlamaForCausalLM(config))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def with_entry(whole: Path, path: Path, key: str, value: bytes) -> Path:
    """The file with another value (its type included) for one metadata entry."""
    raw, header = whole.read_bytes(), read_gguf(whole)
    start, end = header.spans[key]
    data = min(tensor.start_byte for tensor in header.tensors)
    head = raw[:start] + text(key) + value + raw[end : _header_end(raw, header)]
    path.write_bytes(head + b"\0" * (-len(head) % 32) + raw[data:])
    return path


def _header_end(raw: bytes, header: Any) -> int:
    """Where the table of tensors ends, before the padding."""
    last = max(header.tensors, key=lambda tensor: raw.index(text(tensor.name)))
    return raw.index(text(last.name)) + 8 + len(last.name) + 4 + 8 * len(last.shape) + 4 + 8


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<I", STRING) + text("</s>"),
        struct.pack("<IIQI", ARRAY, UINT32, 1, 2),
        struct.pack("<IQ", INT64, 2**31),
        struct.pack("<Iq", INT64, -5),
        struct.pack("<If", 6, 2.0),
    ],
)
def test_an_end_that_is_no_token_id_is_refused_by_name(whole: Path, tmp_path: Path, value: bytes) -> None:
    path = with_entry(whole, tmp_path / "ends.gguf", "tokenizer.ggml.eos_token_id", value)
    with pytest.raises(ModelError, match=r"ends\.gguf says tokenizer\.ggml\.eos_token_id="):
        end_ids(read_gguf(path))
    with pytest.raises(ModelError, match=r"ends\.gguf"):
        load_checkpoint(str(path), skip_tokenizer_init=True)


def test_the_absent_end_of_llama_cpp_is_no_end(whole: Path, tmp_path: Path) -> None:
    absent = struct.pack("<II", UINT32, 2**32 - 1)
    path = with_entry(whole, tmp_path / "none.gguf", "tokenizer.ggml.eos_token_id", absent)
    assert end_ids(read_gguf(path)) == set()
    assert load_checkpoint(str(path), skip_tokenizer_init=True).generation.eos_token_ids == ()


def test_a_rule_of_splitting_that_is_no_text_is_refused(whole: Path, tmp_path: Path) -> None:
    path = with_entry(whole, tmp_path / "rule.gguf", "tokenizer.ggml.pre", struct.pack("<IIQI", ARRAY, UINT32, 1, 2))
    with pytest.raises(ModelError, match=r"rule\.gguf"):
        load_checkpoint(str(path))


def test_more_layers_than_tensors_are_refused_before_a_model_is_built(whole: Path, tmp_path: Path) -> None:
    path = with_entry(whole, tmp_path / "deep.gguf", "llama.block_count", struct.pack("<II", UINT32, 2**32 - 1))
    with pytest.raises(ModelError, match=r"deep\.gguf says llama\.block_count=4294967295, and there are 12 tensors"):
        load_checkpoint(str(path))


def test_random_damage_is_refused_or_loads(whole: Path, tmp_path: Path) -> None:
    raw, path = whole.read_bytes(), tmp_path / "damaged.gguf"
    start = min(tensor.start_byte for tensor in read_gguf(whole).tensors)
    random, loaded, refused = Random(3), 0, 0
    for _ in range(120):
        damaged = bytearray(raw)
        for _ in range(random.choice([1, 1, 2])):
            damaged[random.randrange(start)] = random.choice([0, 1, 127, 255, random.randrange(256)])
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ModelError:
            refused += 1
            continue
        if loaded < 6:  # what reads well goes on to Transformers: a few are enough here
            loaded += 1
            try:
                load_checkpoint(str(path))
            except ModelError as error:
                assert "damaged.gguf" in str(error)  # noqa: PT017 - some changes are harmless
    assert refused > 50
    assert loaded == 6
