"""GGUF files: the same model as its safetensors original, and a refusal for all that would be served wrongly."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_llama, write_llama_gguf
from transformers import AutoModelForCausalLM

from octavo.errors import ModelError
from octavo.models.gguf_file import read_gguf
from octavo.models.load import load_checkpoint


@pytest.fixture
def original(tmp_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "original", tokenizer=False))


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_checkpoint(str(path), **options)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_a_gguf_is_the_model_it_was_made_from(tmp_path: Path, original: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, original)
    loaded = load_checkpoint(str(path))
    tokens = torch.tensor([[1, 5, 9, 4, 4, 30]])
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens).logits, original(tokens).logits)
    assert loaded.dtype == torch.float32
    assert loaded.generation.eos_token_ids == (2,)
    assert loaded.max_model_len == 64
    assert loaded.config_json["num_key_value_heads"] == 2
    assert loaded.tokenizer("abc").input_ids == [31, 5]
    assert not loaded.model.training
    assert load_checkpoint(str(path), dtype="bf16").model.dtype == torch.bfloat16


def test_a_file_of_the_same_name_in_the_working_directory_is_not_taken(
    tmp_path: Path, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_llama_gguf(tmp_path / place / "tiny.gguf", original)
        with torch.no_grad():
            original.lm_head.weight.mul_(2)
    monkeypatch.chdir(tmp_path / "here")
    head = original.lm_head.weight
    assert torch.equal(load_checkpoint(str(tmp_path / "there" / "tiny.gguf")).model.lm_head.weight * 2, head)
    assert torch.equal(load_checkpoint("../there/tiny.gguf").model.lm_head.weight * 2, head)
    assert torch.equal(load_checkpoint("tiny.gguf").model.lm_head.weight * 4, head)


def test_its_fingerprint_follows_its_weights(tmp_path: Path, original: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, original)
    first = load_checkpoint(str(path)).fingerprint
    assert load_checkpoint(str(path)).fingerprint == first
    with torch.no_grad():
        original.model.layers[0].mlp.up_proj.weight.mul_(2)
    write_llama_gguf(path, original)
    assert load_checkpoint(str(path)).fingerprint != first


def test_a_truncated_gguf_is_refused(tmp_path: Path, original: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, original)
    path.write_bytes(path.read_bytes()[:-100])
    assert "is truncated" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": {"rope_freqs.weight": torch.ones(2)}}, "rope scaling in the tensor rope_freqs.weight"),
        ({"strings": {"llama.rope.scaling.type": "linear"}}, "rope scaling of type 'linear'"),
        ({"extra": {"blk.0.attn_sinks.weight": torch.ones(400)}}, "400 would be left out"),
        ({"pre": "of its own"}, "rule 'of its own'"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    tmp_path: Path, original: Any, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, original, **changes)
    assert said in refusal(path)


def test_an_unknown_splitting_rule_does_not_matter_without_the_tokenizer(tmp_path: Path, original: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, original, pre="of its own")
    assert load_checkpoint(str(path), skip_tokenizer_init=True).tokenizer is None


def test_digits_are_split_as_the_file_asks(tmp_path: Path, original: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, original, pre="smollm")
    splitter = load_checkpoint(str(path)).tokenizer.backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("a12")] == ["a", "1", "2"]


def test_a_weight_that_is_missing_is_named(tmp_path: Path, original: Any) -> None:
    path = tmp_path / "tiny.gguf"
    original.config.num_hidden_layers = 1
    write_llama_gguf(path, original)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.0.ffn_up.weight", b"blk.7.ffn_up.weight"))
    assert "mlp.up_proj.weight" in refusal(path)


def split_gguf(whole: Path, *, count: int = 3, told: int | None = None) -> list[Path]:
    """The file in parts as llama.cpp splits one: all metadata in the first, tensors spread over all."""
    header = read_gguf(whole)
    raw, per = whole.read_bytes(), -(-len(header.tensors) // count)
    parts = []
    for number in range(count):
        own = header.tensors[number * per : (number + 1) * per]
        fields = [raw[start:end] for start, end in header.spans.values()] if number == 0 else []
        for key, value in (("split.no", number), ("split.count", told or count)):
            fields.append(struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IH", 2, value))
        head, data = b"GGUF" + struct.pack("<IQQ", 3, len(own), len(fields)) + b"".join(fields), b""
        for tensor in own:
            head += struct.pack("<Q", len(tensor.name)) + tensor.name.encode()
            head += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            head += struct.pack("<IQ", 0, len(data))
            data += raw[tensor.start_byte : tensor.start_byte + tensor.bytes]
            data += b"\0" * (-len(data) % 32)
        parts.append(whole.with_name(f"tiny-{number + 1:05d}-of-{count:05d}.gguf"))
        parts[-1].write_bytes(head + b"\0" * (-len(head) % 32) + data)
    whole.unlink()
    return parts


@pytest.fixture
def parts(tmp_path: Path, original: Any, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    write_llama_gguf(tmp_path / "whole.gguf", original)
    return split_gguf(tmp_path / "whole.gguf")


def test_a_split_gguf_is_joined_once_and_loads_as_the_whole_one(parts: list[Path], original: Any) -> None:
    tokens = torch.tensor([[1, 5, 9, 4, 4, 30]])
    loads = [load_checkpoint(str(named)) for named in (parts[0], parts[2], parts[0].parent)]
    for loaded in loads:
        with torch.no_grad():
            assert torch.equal(loaded.model(tokens).logits, original(tokens).logits)
        assert loaded.tokenizer("abc").input_ids == [31, 5]
        assert loaded.path == loads[0].path
    assert len(list(loads[0].path.parent.glob("*"))) == 2
    assert not [key for key in read_gguf(loads[0].path).metadata if key.startswith("split.")]


def test_a_truncated_part_and_a_part_of_another_model_are_refused(parts: list[Path]) -> None:
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-40])
    assert f"{parts[1].name} is truncated" in refusal(parts[1])
    parts[1].write_bytes(parts[2].read_bytes())
    assert "says inside that it is part 2 (counted from 0) of 3" in refusal(parts[1])
    parts[1].write_bytes(whole)
    parts[1].rename(parts[1].with_name("gone"))
    assert "1 of 3 parts are missing: tiny-00002-of-00003.gguf" in refusal(parts[0])


def test_a_cache_that_cannot_take_the_joined_file_is_named(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert "set OCTAVO_CACHE" in refusal(parts[0])
