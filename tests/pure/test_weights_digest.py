"""Weight files named to the last bit, once a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.models.weights_digest import weights_digest


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    made = [tmp_path / f"model-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(made):
        path.write_bytes(bytes([number]) * 5000)
    return made


def read_count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files were read whole, counted from here on."""
    count = [0]
    whole = hashlib.file_digest

    def counted(file: object, name: str) -> object:
        count[0] += 1
        return whole(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return count


def test_every_byte_counts(files: list[Path]) -> None:
    first = weights_digest(files)
    seen = {first}
    for path in files:
        raw = path.read_bytes()
        for place in (0, 1234, len(raw) - 1):
            path.write_bytes(raw[:place] + b"\xff" + raw[place + 1 :])
            seen.add(weights_digest(files))
        path.write_bytes(raw)
    assert len(seen) == 10
    assert weights_digest(files) == first


def test_neither_the_place_nor_the_order_asked_counts(files: list[Path], tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    moved = [copies / path.name for path in files]
    for path, copy in zip(files, moved, strict=True):
        copy.write_bytes(path.read_bytes())
    assert weights_digest(moved[::-1]) == weights_digest(files)
    assert weights_digest(files[:2]) != weights_digest(files)


def test_a_file_is_read_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    count = read_count(monkeypatch)
    first = weights_digest(files)
    assert weights_digest(files) == first
    assert count == [3]


def test_a_file_whose_time_was_set_back_is_read_again(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_digest(files)
    before = files[0].stat()
    files[0].write_bytes(b"\7" * 5000)
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    count = read_count(monkeypatch)
    assert weights_digest(files) != first
    assert count == [1]


@pytest.mark.parametrize("note", [
    b"", b"nonsense", b"[]", b"{}", b'{"state": 1, "sha256": "x"}', b'{"sha256": 7}', b"[" * 100_000,
])  # fmt: skip
def test_a_damaged_note_is_no_note(files: list[Path], tmp_path: Path, note: bytes) -> None:
    first = weights_digest(files)
    notes = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(notes) == 3
    for path in notes:
        path.write_bytes(note)
    assert weights_digest(files) == first


def test_where_nothing_can_be_noted_it_is_computed_each_time(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights_digest(files)
    blocked = tmp_path / "a file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("OCTAVO_CACHE", str(blocked))
    assert weights_digest(files) == first


def test_a_file_that_is_gone_is_named(files: list[Path]) -> None:
    files[1].unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors"):
        weights_digest(files)
