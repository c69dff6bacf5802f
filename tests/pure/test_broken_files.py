"""Files that would have hung the loader, filled memory or raised what nobody catches: each is refused by name."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.files import check_layers, find_checkpoint
from octavo.models.generation_defaults import FILE_NAME, read_generation_defaults
from octavo.models.gguf_file import read_gguf
from octavo.models.weight_files import read_safetensors

SECONDS = 20.0


def refusal_of(call: Callable[[], Any]) -> str:
    """What it is refused with, in a thread: one that waits for ever fails the test and not the run."""
    said: list[str] = []

    def run() -> None:
        try:
            said.append(f"nothing was refused: {call()}")
        except ModelError as error:
            said.append(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test says it
            said.append(f"escaped: {error!r}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert said, f"no answer in {SECONDS} s"
    return said[0]


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def checkpoint(tmp_path: Path, **config: Any) -> Path:
    told = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 2} | config
    (tmp_path / "config.json").write_text(json.dumps(told))
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"model.layers.0.a": entry}, b"\0" * 8))
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.gguf"])
def test_a_pipe_where_a_file_should_be_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    if name != "x.gguf":
        checkpoint(tmp_path)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    found = tmp_path / name if name == "x.gguf" else tmp_path
    assert f"{name} is no file, but a pipe" in refusal_of(lambda: find_checkpoint(found))


def test_a_pipe_in_place_of_generation_defaults_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    assert "is no file, but a pipe" in refusal_of(lambda: read_generation_defaults(tmp_path, {}))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ({"temperature": 10**400}, "temperature="),
        ({"temperature": 1e5}, "temperature=100000.0"),
        ({"top_k": 2**31}, "top_k=2147483648"),
        ({"top_k": 10**400}, "top_k="),
        ({"repetition_penalty": 1e300}, "repetition_penalty=1e+300"),
        ({"eos_token_id": 10**20}, "eos_token_id=100000000000000000000"),
        ({"eos_token_id": [1, 2**31]}, "eos_token_id="),
    ],
)
def test_defaults_that_no_request_could_use_are_refused_when_the_model_is_loaded(
    tmp_path: Path, told: Any, said: str
) -> None:
    (tmp_path / FILE_NAME).write_text(told if isinstance(told, str) else json.dumps(told))
    message = refusal_of(lambda: read_generation_defaults(tmp_path, {}))
    assert said in message
    assert FILE_NAME in message


@pytest.mark.parametrize("told", [{}, {"text_config": {"num_hidden_layers": 10**12}}])
def test_more_layers_than_tensors_are_refused_before_a_model_is_built(tmp_path: Path, told: dict[str, Any]) -> None:
    path = checkpoint(tmp_path, **(told or {"num_hidden_layers": 10**12}))
    assert "says num_hidden_layers=1000000000000, and there are 1 tensors" in refusal_of(lambda: find_checkpoint(path))


def test_as_many_layers_as_tensors_are_no_reason_to_refuse(tmp_path: Path) -> None:
    assert find_checkpoint(checkpoint(tmp_path)).config["num_hidden_layers"] == 1
    check_layers(tmp_path, {"llama.block_count": 4}, 4, ("llama.block_count",))
    with pytest.raises(ModelError, match=r"llama\.block_count=5"):
        check_layers(tmp_path, {"llama.block_count": 5}, 4, ("llama.block_count",))


def test_a_shape_whose_product_would_take_for_ever_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [9] * 3_000_000, "data_offsets": [0, 8]}
    path.write_bytes(safetensors_bytes({"a": entry}, b"\0" * 8))
    assert "without a sound dtype, shape" in refusal_of(lambda: read_safetensors(path))
    path.write_bytes(safetensors_bytes({"a": entry | {"shape": [2**62, 2]}}, b"\0" * 8))
    assert "without a sound dtype, shape" in refusal_of(lambda: read_safetensors(path))


def test_a_header_of_many_names_of_which_the_last_is_there_twice_is_refused_soon(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = [f"n{i}" for i in range(60_000)]
    body = ",".join(f'"{name}":{entry}' for name in [*names, names[-1]])
    path.write_bytes(safetensors_bytes(f"{{{body}}}".encode()))
    assert "names 'n59999' twice" in refusal_of(lambda: read_safetensors(path))


def gguf_with(value: bytes, *, size: int) -> bytes:
    """One metadata entry `k` and no tensor, in a file that has room for what the entry claims."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + value + struct.pack("<I", size)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (struct.pack("<IIQ", 9, 0, 2**31), "an array of 2147483648, at byte"),
        (struct.pack("<IIQ", 9, 8, 2**27), "an array of 134217728, at byte"),
        (struct.pack("<IQ", 8, 2**31), "of 2147483648 bytes, at byte"),
    ],
)
def test_a_damaged_count_in_a_large_file_does_not_fill_memory(tmp_path: Path, value: bytes, said: str) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_with(value, size=0))
    os.truncate(path, 2**33)  # a hole: takes no room on the disk
    begun = time.monotonic()
    assert said in refusal_of(lambda: read_gguf(path))
    assert time.monotonic() - begun < SECONDS / 2


def test_an_alignment_of_a_whole_address_space_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    name = b"general.alignment"
    pair = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 10, 2**62)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    assert "general.alignment=4611686018427387904" in refusal_of(lambda: read_gguf(path, part=True))


def test_random_damage_to_a_header_of_safetensors_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"t{i}": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]} for i in range(4)}
    whole = safetensors_bytes(tensors | {"__metadata__": {"format": "pt"}}, b"\1" * 64)
    random = Random(0)
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(random.choice([1, 1, 2, 8])):
            damaged[random.randrange(len(whole) - 64)] = random.choice([0, 9, 0x22, 0x7B, 0x5B, 0x39, 0xFF, 0x2D])
        path.write_bytes(damaged)
        try:
            read_safetensors(path)
        except ModelError as error:
            refused += 1
            assert "model.safetensors" in str(error)  # noqa: PT017 - some changes are harmless
    assert refused > 400
