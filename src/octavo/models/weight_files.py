"""Checks one weight file before anything trusts it: safetensors headers, read by ourselves.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors' bytes back to back. The
invariant after `read_safetensors`: every tensor lies inside the file, none overlaps another, and header
and data add up to the file's size to the byte. Reads headers only, never weights; imports no torch.
What a checkpoint made of several files must satisfy is in `files`.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from octavo.errors import ModelError

# The format's own limit: a longer header is damage, not a model.
HEADER_LIMIT_BYTES = 100_000_000

# No tensor has more, and no number in a header is larger: the product of many is not computed before that is known.
MOST_DIMENSIONS = 32
MOST_BYTES = 1 << 62

SHOWN_WHOLE = 80

# Bits of an element, by the format's names.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file describes it. `start_byte` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start_byte: int
    bytes: int


def model_error(path: Path, what: str, remedy: str) -> ModelError:
    """A `ModelError` that names the file, what is wrong with it and what to do."""
    where = f" (in {path})" if len(str(path)) > SHOWN_WHOLE else ""  # an error shows only the start of a long value
    return ModelError("model", str(path), f"{what}{where}. {remedy}")


def open_for_reading(path: Path) -> BinaryIO:
    """`path.open("rb")`, with every refusal of the system turned into a message that says what to do."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):  # a pipe would be waited for until somebody writes to it
            what = f"{path.name} is no file, but a pipe, a socket or a device"
            raise model_error(path, what, "Name a file on a disk")
        return path.open("rb")
    except FileNotFoundError:
        if path.is_symlink():
            what = f"{path.name} is a link to {path.readlink()}, which does not exist"
            raise model_error(path, what, "Fetch the model again") from None
        raise model_error(path, f"{path.name} does not exist", "Fetch the file, or correct the path") from None
    except IsADirectoryError:
        raise model_error(path, f"{path.name} is a directory, not a file", "Name a file") from None
    except PermissionError:
        what = f"no permission to read {path.name}"
        raise model_error(path, what, "Give this user read permission (chmod u+r), or run as its owner") from None
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror or error}"
        raise model_error(path, what, "Check the disk or mount it lies on") from error


def read_bytes(path: Path, file: BinaryIO, count: int) -> bytes:
    """`file.read(count)`, with a failing disk named."""
    try:
        return file.read(count)
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror or error}"
        raise model_error(path, what, "Check the disk or mount it lies on") from error


def file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def refuse_intruder(path: Path, head: bytes, size: int) -> None:
    """Raise if the file starts like something that often stands where weights should be."""
    text = head.lstrip().lower()
    again = "Download the file again"
    if size == 0:
        raise model_error(path, f"{path.name} is empty (0 bytes)", again)
    if head.startswith(b"version https://git-lfs"):
        what = f"{path.name} ({size} bytes) looks like a git-lfs pointer, not the weights themselves"
        raise model_error(path, what, "Install git-lfs and run `git lfs pull` in that directory, or download the file")
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        what = f"{path.name} ({size} bytes) looks like a web page, not weights: a download was answered with an error"
        raise model_error(path, what, f"{again}, logged in if the model is gated")
    if head[8:9] == b"{":  # a header after its length, whose bytes may look like anything
        return
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        what = f"{path.name} looks like a PyTorch pickle, which can run code when it is read"
        raise model_error(path, what, "Convert the model to safetensors")
    if head.startswith(b"GGUF") and path.suffix != ".gguf":
        raise model_error(path, f"{path.name} looks like a GGUF file", "Rename it to end in .gguf and name it as model")


def read_safetensors(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of one safetensors file, in the order of their bytes. Raises `ModelError` on any damage."""
    with open_for_reading(path) as file:
        size = file_size(file)
        head = read_bytes(path, file, 512)
        refuse_intruder(path, head, size)
        if size < 8:
            raise model_error(path, f"{path.name} is truncated: {size} bytes, and its header length alone takes 8",
                              "Download the file again")  # fmt: skip
        header_bytes = int.from_bytes(head[:8], "little")
        if header_bytes > HEADER_LIMIT_BYTES:
            what = (f"{path.name} announces a header of {header_bytes} bytes, more than the {HEADER_LIMIT_BYTES} that"
                    f" safetensors allows: it is not a safetensors file, or its start is damaged")  # fmt: skip
            raise model_error(path, what, "Download the file again")
        if 8 + header_bytes > size:
            what = f"{path.name} is truncated: its header ends at byte {8 + header_bytes}, the file at {size}"
            raise model_error(path, f"{what} ({8 + header_bytes - size} bytes are missing)", "Download the file again")
        file.seek(8)
        header = _parse_header(path, read_bytes(path, file, header_bytes))
    entries = [_entry(path, name, told, 8 + header_bytes) for name, told in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start_byte, entry.bytes))
    _check_layout(path, entries, 8 + header_bytes, size)
    return tuple(entries)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise model_error(path, f"the header of {path.name} names {twice!r} twice", "Download the file again")
        return table

    try:
        header = json.loads(raw, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        what = f"the header of {path.name} is not JSON ({error}): the file is damaged or is no safetensors file"
        raise model_error(path, what, "Download the file again") from None
    if not isinstance(header, dict):
        what = f"the header of {path.name} is a JSON {type(header).__name__}, not an object"
        raise model_error(path, what, "Download the file again")
    return header


def _entry(path: Path, name: str, told: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = told["dtype"], told["shape"], told["data_offsets"]
        if len(shape) > MOST_DIMENSIONS or not all(
            type(number) is int and 0 <= number < MOST_BYTES for number in (*shape, begin, end)
        ):
            raise ValueError("holds what is no size")  # noqa: TRY301, the same refusal as below
    except (TypeError, KeyError, ValueError):
        what = f"{path.name} describes tensor {name!r} without a sound dtype, shape and data_offsets"
        raise model_error(path, what, "Download the file again") from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        what = f"{path.name} gives tensor {name!r} the dtype {dtype!r}, which safetensors does not have"
        raise model_error(path, what, f"Known dtypes: {', '.join(sorted(DTYPE_BITS))}. Download the file again")
    expected = -(-prod(shape) * DTYPE_BITS[dtype] // 8)
    if end - begin != expected:
        what = (f"{path.name} gives tensor {name!r} of shape {list(shape)} and dtype {dtype} {end - begin} bytes,"
                f" and it takes {expected}")  # fmt: skip
        raise model_error(path, what, "Download the file again")
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, expected)


def _check_layout(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    """Tensors back to back from the end of the header to the end of the file."""
    position = data_start
    for entry in entries:
        if entry.start_byte != position:
            kind = "overlaps the tensor before it" if entry.start_byte < position else "leaves a gap before it"
            what = (
                f"{path.name}: tensor {entry.name!r} starts at byte {entry.start_byte}, expected {position}: it {kind}"
            )
            raise model_error(path, what, "Download the file again")
        position += entry.bytes
    if position > size:
        what = (f"{path.name} is truncated: its header describes {position} bytes, the file has {size}"
                f" ({position - size} bytes are missing)")  # fmt: skip
        raise model_error(path, what, "Download the file again")
    if position < size:
        what = (f"{path.name} is too long: its header describes {position} bytes, the file has {size}"
                f" ({size - position} bytes follow the last tensor)")  # fmt: skip
        raise model_error(path, what, "Download the file again")
