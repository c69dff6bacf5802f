"""What a damaged GGUF file gets: a `ModelError` naming file and fault, quickly, whatever its counts say."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.files import find_checkpoint
from octavo.models.gguf_file import read_gguf

pytest.importorskip("gguf")

F32, Q8_0 = 0, 8


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def row(name: str, shape: tuple[int, ...] = (4, 8), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def gguf_bytes(
    *,
    pairs: tuple[bytes, ...] = (ARCHITECTURE,),
    rows: tuple[bytes, ...] = (row("a"), row("b", offset=128)),
    data_bytes: int = 256,
    **preamble: Any,
) -> bytes:
    """A whole little file; `preamble` overrides magic, version, tensors (count) and metadata (count)."""
    head = preamble.get("magic", b"GGUF") + struct.pack(
        "<IQQ", preamble.get("version", 3), preamble.get("tensors", len(rows)), preamble.get("metadata", len(pairs))
    )
    head += b"".join(pairs) + b"".join(rows)
    return head + b"\0" * (-len(head) % 32) + b"\1" * data_bytes


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    assert time.monotonic() - started < 2
    assert caught.value.field == "model"
    assert "tiny.gguf" in str(caught.value)
    return str(caught.value)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    numbers = text("x.list") + struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3)
    strings = text("x.names") + struct.pack("<IIQ", 9, 8, 2) + text("p") + text("q")
    path.write_bytes(gguf_bytes(pairs=(ARCHITECTURE, numbers, strings)))
    header = read_gguf(path)
    assert header.metadata == {"general.architecture": "llama", "x.list": [1, 2, 3], "x.names": ["p", "q"]}
    assert [(tensor.name, tensor.shape, tensor.bytes) for tensor in header.tensors] == [("a", (8, 4), 128),
                                                                                       ("b", (8, 4), 128)]  # fmt: skip
    assert header.weights_bytes == 256


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"magic": b"GGUX"}, "does not start with the letters GGUF"),
        ({"magic": b"tjgg"}, "old GGML format"),
        ({"version": 1}, "version 1"),
        ({"version": 99}, "version 99"),
        ({"version": 3 << 24}, "big-endian"),
        ({"tensors": 2**62}, "a table of 4611686018427387904 tensors"),
        ({"metadata": 2**62}, "metadata of 4611686018427387904 entries"),
        ({"tensors": 3}, "tiny.gguf is"),
        ({"data_bytes": 200}, "56 bytes of it are missing"),
        ({"data_bytes": 0}, "is truncated"),
        ({"data_bytes": 256 + 33}, "too long"),
        ({"rows": ()}, "holds no tensors"),
        ({"rows": (row("a"), row("a", offset=128))}, "names tensor 'a' twice"),
        ({"rows": (row("a"), row("b", offset=64))}, "overlaps the one before"),
        ({"rows": (row("a"), row("b", offset=2**50))}, "is truncated"),
        ({"rows": (row("a", offset=5),)}, "not a multiple of 32"),
        ({"rows": (row("a", kind=77),)}, "element type 77"),
        ({"rows": (row("a", kind=Q8_0),)}, "cannot have the shape"),
        ({"rows": (row("a", shape=(2**32, 2**32)),)}, "cannot have the shape"),
        ({"rows": (row("a", shape=(1, 1, 1, 1, 4)),)}, "5 dimensions"),
        ({"pairs": ()}, "general.architecture"),
        ({"pairs": (text("k") + struct.pack("<I", 50),)}, "the type 50"),
        ({"pairs": (text("k") + struct.pack("<IQ", 8, 2**60),)}, "the value of 'k'"),
        ({"pairs": (text("k") + struct.pack("<IIQ", 9, 5, 2**60),)}, "an array of 1152921504606846976"),
        ({"pairs": (text("k") + struct.pack("<IIQ", 9, 8, 2**60),)}, "an array of 1152921504606846976"),
        ({"pairs": (text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40,)}, "nested too deeply"),
        ({"pairs": (struct.pack("<Q", 2) + b"\xff\xfe",)}, "not UTF-8"),
        ({"pairs": (ARCHITECTURE, text("general.alignment") + struct.pack("<II", 4, 0))}, "general.alignment=0"),
        ({"pairs": (ARCHITECTURE, text("general.alignment") + struct.pack("<II", 4, 24))}, "general.alignment=24"),
    ],
)
def test_a_damaged_file_is_refused_with_its_fault(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, gguf_bytes(**changes))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"GG", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"<!DOCTYPE html>", "web page"),
    ],
)
def test_what_is_no_gguf_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refusal(tmp_path, content)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes()
    for length in range(len(whole)):
        refusal(tmp_path, whole[:length])


def test_a_damaged_byte_never_hangs_or_escapes(tmp_path: Path) -> None:
    whole = gguf_bytes()
    path = tmp_path / "tiny.gguf"
    for position in range(len(whole) - 256):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                read_gguf(path)
            except ModelError as error:
                assert "tiny.gguf" in str(error)  # noqa: PT017, most but not all changes are damage


def test_one_part_alone_says_which_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "big-00001-of-00013.gguf"
    path.write_bytes(gguf_bytes())
    for named in (path, tmp_path):
        with pytest.raises(ModelError) as caught:
            find_checkpoint(named)
        message = str(caught.value)
        assert "12 of 13 parts are missing: big-00002-of-00013.gguf" in message
        assert "and 4 more" in message


def test_a_part_that_counts_wrongly_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big-00014-of-00013.gguf"
    path.write_bytes(gguf_bytes())
    with pytest.raises(ModelError, match="calls itself part 14 of 13"):
        find_checkpoint(path)


def test_a_directory_of_several_ggufs_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf_bytes())
    with pytest.raises(ModelError, match=r"2 GGUF models: a\.gguf, b\.gguf\. Name one"):
        find_checkpoint(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert find_checkpoint(tmp_path).path == tmp_path / "a.gguf"
