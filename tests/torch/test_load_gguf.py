"""GGUF files: the same model as its safetensors original, and a refusal for all that would be served wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_llama, write_llama_gguf
from transformers import AutoModelForCausalLM

from octavo.errors import ModelError
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


def test_all_parts_of_a_split_gguf_say_how_to_join_them(tmp_path: Path, original: Any) -> None:
    for number in (1, 2):
        write_llama_gguf(tmp_path / f"tiny-{number:05d}-of-00002.gguf", original)
    message = refusal(tmp_path / "tiny-00002-of-00002.gguf")
    assert "llama-gguf-split --merge tiny-00001-of-00002.gguf tiny.gguf" in message
