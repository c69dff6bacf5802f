"""A plan of a directory with weights: they are counted by their headers, and a config that they contradict is refused.

Covers a config older than its weights in every form in which a checkpoint comes: one file, parts with an index,
an index with some of its parts or none.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import run
from octavo.errors import ModelError
from octavo.planner.build import plan

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def shapes(kv_heads: int = 2, layers: int = 2) -> dict[str, list[int]]:
    found = {"model.embed_tokens.weight": [256, 64]}
    for layer in range(layers):
        for name, rows in (("q", 64), ("k", kv_heads * 8), ("v", kv_heads * 8)):
            found[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = [rows, 64]
    return found


def write(path: Path, tensors: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (rows, columns) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [end, end + 2 * rows * columns]}
        end += 2 * rows * columns
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def checkpoint(folder: Path, tensors: dict[str, list[int]], parts: int = 1, kept: int | None = None) -> Path:
    """`parts` files with an index (none for one); of them `kept` are there."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if parts == 1:
        write(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    placed = {name: f"model-{1 + i % parts:05d}-of-{parts:05d}.safetensors" for i, name in enumerate(names)}
    total = sum(2 * rows * columns for rows, columns in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in sorted(set(placed.values()))[: parts if kept is None else kept]:
        write(folder / file, {name: tensors[name] for name in names if placed[name] == file})
    return folder


@pytest.mark.parametrize(("parts", "kept"), [(1, None), (2, 2), (2, 1), (2, 0)])
def test_weights_that_agree_are_counted(tmp_path: Path, parts: int, kept: int | None) -> None:
    found = plan(checkpoint(tmp_path, shapes(), parts, kept))
    assert found.weights.device_bytes == 2 * 64 * (256 + 2 * (64 + 16 + 16))
    assert ("files are not here" in found.weights.basis) == (kept is not None and kept < parts)


@pytest.mark.parametrize(("parts", "kept"), [(1, None), (2, 2), (2, 1)])
def test_an_old_config_beside_newer_weights_is_refused_naming_the_tensor(
    tmp_path: Path, parts: int, kept: int | None
) -> None:
    folder = checkpoint(tmp_path, shapes(kv_heads=4), parts, kept)
    with pytest.raises(ModelError, match=r"k_proj.weight has shape \[32, 64\].*they hold 4 kv heads") as caught:
        plan(folder)
    assert caught.value.field == "num_key_value_heads"
    with pytest.raises(ModelError):
        plan(folder, weights_bytes="1MiB", dtype="fp16")  # whatever is known of the weights otherwise


def test_layers_that_the_weights_lack_are_named(tmp_path: Path) -> None:
    for parts in (1, 2):
        with pytest.raises(ModelError, match=r"num_hidden_layers.*to 1"):
            plan(checkpoint(tmp_path, shapes(layers=1), parts))
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


def test_an_index_alone_tells_of_missing_layers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        plan(checkpoint(tmp_path, shapes(layers=1), 2, 0))


def test_an_index_without_its_map_is_damaged(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, shapes(), 2, 0)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 5}}')
    with pytest.raises(ModelError, match="weight_map"):
        plan(folder)


def test_the_command_says_it_in_one_line_and_leaves_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(checkpoint(tmp_path, shapes(kv_heads=4)))]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model.layers.0.self_attn.k_proj.weight" in said
