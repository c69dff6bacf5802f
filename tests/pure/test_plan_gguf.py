"""A GGUF file as the source of a plan: exactly what its header says, or refused by the key that says too much."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.pure.test_files_gguf import gguf_bytes, row, text

from octavo.cli.main import run
from octavo.errors import ModelError
from octavo.geometry.dtypes import BF16
from octavo.geometry.fields import defaults_table
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.from_gguf import MODEL_TYPES, config_from_gguf

pytest.importorskip("gguf")

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 4096,
    "llama.vocab_size": 256,
}


def pair(key: str, value: Any) -> bytes:
    kind, body = (8, text(value)) if isinstance(value, str) else (4, struct.pack("<I", value))
    return text(key) + struct.pack("<I", kind) + body


def write(path: Path, metadata: dict[str, Any], kv_rows: int = 16, layers: int = 2) -> Path:
    """Keys and values of each layer, in float32; `kv_rows` x 64."""
    rows, end = [], 0
    for layer in range(layers):
        for name in ("attn_k", "attn_v"):
            rows.append(row(f"blk.{layer}.{name}.weight", (64, kv_rows), offset=end))
            end += 4 * 64 * kv_rows
    path.write_bytes(
        gguf_bytes(pairs=tuple(pair(*item) for item in metadata.items()), rows=tuple(rows), data_bytes=end)
    )
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_file_is_planned_by_its_metadata_and_its_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "tiny.gguf", LLAMA)
    found = planned(capsys, str(file), "--kv-dtype", "bf16", "--memory", "1GiB")
    assert found["state"]["bytes_per_token_growing"] == 2 * 2 * 2 * 8 * 2
    assert found["ledger"]["weights"] == 2 * 2 * 4 * 64 * 16
    assert "4096" in found["sequence_bytes"]


def test_a_file_whose_tensors_contradict_its_metadata_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(write(tmp_path / "tiny.gguf", LLAMA, kv_rows=32))]) == 2
    assert "blk.0.attn_k.weight has shape [32, 64]" in capsys.readouterr().err
    assert run(["plan", str(write(tmp_path / "tiny.gguf", LLAMA, layers=1))]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err


def test_one_part_of_a_split_file_names_those_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "tiny-00001-of-00003.gguf", LLAMA)
    assert run(["plan", str(first)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "tiny-00002-of-00003.gguf" in said
    assert "tiny-00003-of-00003.gguf" in said


def test_the_parts_of_a_split_file_are_counted_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "tiny-00001-of-00002.gguf", LLAMA, layers=1)
    second = row("blk.1.attn_k.weight", (64, 16))
    (tmp_path / "tiny-00002-of-00002.gguf").write_bytes(gguf_bytes(pairs=(), rows=(second,), data_bytes=4 * 64 * 16))
    found = planned(capsys, str(tmp_path / "tiny-00001-of-00002.gguf"), "--memory", "1GiB")
    assert found["ledger"]["weights"] == 3 * 4 * 64 * 16


def test_a_file_that_is_not_there_is_missing_and_not_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "nowhere.gguf"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "tiny.gguf", LLAMA)
    file.write_bytes(file.read_bytes()[:-100])
    assert run(["plan", str(file)]) == 2
    assert "truncated" in capsys.readouterr().err


# -- metadata to config ---------------------------------------------------------------------------


def test_every_architecture_has_a_class_with_defaults() -> None:
    assert set(MODEL_TYPES.values()) <= set(defaults_table()["types"])


def kept(architecture: str, **more: Any) -> Any:
    told = {"general.architecture": architecture} | {
        f"{architecture}.{name.replace('__', '.')}": value for name, value in more.items()
    }
    return geometry_from_config(config_from_gguf(told), BF16)


def test_windows_follow_the_pattern_of_the_architecture() -> None:
    """Gemma 3 270M: every sixth of 18 layers is full; one key head of 256."""
    g = kept("gemma3", block_count=18, embedding_length=640, attention__head_count=4, attention__head_count_kv=1,
             attention__key_length=256, attention__value_length=256, attention__sliding_window=512)  # fmt: skip
    assert (g.bytes_per_token_growing, g.bytes_per_token_windowed) == (3 * 1024, 15 * 1024)
    assert g.window_tokens == (512,)
    oss = kept("gpt-oss", block_count=36, embedding_length=2880, attention__head_count=64, attention__head_count_kv=8,
               attention__key_length=64, attention__value_length=64, attention__sliding_window=128,
               expert_count=128, expert_used_count=4)  # fmt: skip
    assert (oss.bytes_per_token_growing, oss.bytes_per_token_windowed) == (36_864, 36_864)


def test_a_latent_is_one_row_however_many_heads_the_file_gives() -> None:
    g = kept("deepseek2", block_count=61, embedding_length=7168, attention__head_count=128, attention__head_count_kv=1,
             attention__kv_lora_rank=512, attention__key_length=576, attention__value_length=512,
             rope__dimension_count=64)  # fmt: skip
    assert g.bytes_per_token == 70_272


def test_heads_without_a_width_share_the_hidden_size_whatever_the_class_supplies() -> None:
    g = kept("qwen3", block_count=2, embedding_length=1024, attention__head_count=16, attention__head_count_kv=8)
    assert g.bytes_per_token == 2 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "attention.indexer.head_count", 4),
        ("llama", "ssm.state_size", 16),
        ("qwen3", "attention.sliding_window_pattern", 6),
        ("llama", "wkv.head_size", 64),
    ],
)
def test_a_key_that_no_rule_reads_is_named_and_not_passed_over(architecture: str, key: str, value: int) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        kept(architecture, block_count=2, embedding_length=64, attention__head_count=8, **{key: value})
    assert caught.value.field == f"{architecture}.{key}"


@pytest.mark.parametrize("architecture", ["mamba", "rwkv6", "qwen3next", "llama4", "clip", "t5"])
def test_an_architecture_without_rules_is_refused_by_name(architecture: str) -> None:
    with pytest.raises(ModelError, match=architecture):
        kept(architecture, block_count=2)


def test_a_file_that_does_not_say_its_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="block_count"):
        kept("llama", embedding_length=64, attention__head_count=8)
