"""Checks a GGUF file before anything trusts it: header, metadata and tensor table, read by ourselves.

The invariant after `read_gguf`: all counts and lengths were checked against the bytes that are left before
they were followed (a damaged count cannot make us loop), every tensor lies inside the file, none overlaps
another, and nothing but padding follows the last. Reads no weights and imports no torch.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from octavo.models.weight_files import file_size, model_error, open_for_reading, read_bytes, refuse_intruder

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
# A vocabulary has some hundred thousand entries; a damaged count in a large file must not become as many objects.
_MAX_ITEMS = 1 << 24
_MAX_TEXT_BYTES = 1 << 26
_MAX_ALIGNMENT = 1 << 20
_AGAIN = "Download the file again"

_STRING, _ARRAY = 8, 9
_SCALARS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
                   12: "<d"}  # fmt: skip
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the table. `shape` is in torch's order; `start_byte` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start_byte: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    spans: dict[str, tuple[int, int]]
    """Where each metadata entry begins and ends in the file."""

    @property
    def alignment(self) -> int:
        return int(self.metadata.get("general.alignment", 32))

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


def missing_parts(path: Path) -> tuple[str, ...]:
    """The other parts of a split file (`-00001-of-00013`) that are not beside it; empty if it is not split."""
    return tuple(part.name for part in parts_of(path) if not part.exists())


def parts_of(path: Path) -> tuple[Path, ...]:
    """All parts of the split file that `path` is one of, in order; itself alone if it is not split."""
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    total = int(match["total"])
    if not 1 <= int(match["number"]) <= total:
        what = f"{path.name} calls itself part {int(match['number'])} of {total}"
        raise model_error(path, what, "Restore the file's original name")
    return tuple(
        path.with_name(f"{match['stem']}-{number:05d}-of-{total:05d}{match['suffix']}")
        for number in range(1, total + 1)
    )


def refuse_missing_parts(path: Path) -> None:
    missing = missing_parts(path)
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        what = (
            f"{path.name} is one part of a split model, and {len(missing)} of {len(parts_of(path))} parts are missing"
        )
        raise model_error(path, f"{what}: {shown}", "Put all parts in one directory")


class _Cursor:
    """Reads a header forwards; every length is checked against what is left of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.position = 0
        self.size = size
        self._file = file

    def take(self, count: int, what: str) -> bytes:
        self.require(count, 1, what)
        self.position += count
        return read_bytes(self.path, self._file, count)

    def require(self, count: int, least_bytes: int, what: str) -> None:
        """Raise unless `count` items of at least `least_bytes` each can still be in the file."""
        left = self.size - self.position
        if count * least_bytes > left:
            least = f"{'at least ' if least_bytes > 1 else ''}{count * least_bytes}"
            problem = f"{what} at byte {self.position} needs {least} bytes, and {left} are left"
            problem = f"{self.path.name} is truncated or damaged: {problem}"
            raise model_error(self.path, problem, _AGAIN)

    def limit(self, count: int, most: int, what: str) -> None:
        """Raise for what no model has, although the file would have room for it."""
        if most < count <= self.size - self.position:
            problem = f"{self.path.name} is damaged: {what}, at byte {self.position}, is more than the {most} allowed"
            raise model_error(self.path, problem, _AGAIN)

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        self.limit(length, _MAX_TEXT_BYTES, f"{what}, of {length} bytes")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise model_error(self.path, f"{self.path.name} is damaged: {what} is not UTF-8", _AGAIN) from None


def read_gguf(path: Path, *, part: bool = False) -> GgufHeader:
    """Header, metadata and tensor table of one GGUF file. Raises `ModelError` on any damage.

    With `part`, the file may be one of a split model's, which need not hold tensors or say the architecture.
    """
    with open_for_reading(path) as file:
        size = file_size(file)
        head = read_bytes(path, file, 512)
        file.seek(0)
        refuse_intruder(path, head, size)
        cursor = _Cursor(path, file, size)
        version, tensor_count, pair_count = _read_preamble(cursor)
        cursor.require(pair_count, 13, f"metadata of {pair_count} entries")
        metadata: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for index in range(pair_count):
            start = cursor.position
            key = cursor.text(f"metadata key {index}")
            metadata[key] = _read_value(cursor, cursor.number("<I", f"the type of {key!r}"), key, 0)
            spans[key] = (start, cursor.position)
        cursor.require(tensor_count, 24, f"a table of {tensor_count} tensors")
        rows = [_read_row(cursor, index) for index in range(tensor_count)]
    if not part and not isinstance(metadata.get("general.architecture"), str):
        what = f"{path.name} does not say its general.architecture, so no config can be built for it"
        raise model_error(path, what, _AGAIN)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        what = f"{path.name} has general.alignment={alignment!r}, not a power of two up to {_MAX_ALIGNMENT}"
        raise model_error(path, what, _AGAIN)
    if not rows and not part:
        raise model_error(path, f"{path.name} holds no tensors", "Name the GGUF file that holds the weights")
    tensors = _place(path, rows, -(-cursor.position // alignment) * alignment, alignment, size)
    return GgufHeader(path, version, metadata, tensors, spans)


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    path = cursor.path
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        what = f"{path.name} does not start with the letters GGUF but with {magic!r}: it is no GGUF file"
        if magic in (b"tjgg", b"lmgg", b"fmgg", b"algg", b"GGML", b"GGJT"):
            what = f"{path.name} is in the old GGML format, which GGUF replaced"
        raise model_error(path, what, "Convert it to GGUF, or download the file again")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"{path.name} is GGUF version {version}; versions 2 and 3 can be read"
        if big in _VERSIONS:
            what = f"{path.name} is a big-endian GGUF file (version {big}); only little-endian ones can be read"
        raise model_error(path, what, "Convert the file again with a current converter")
    return version, cursor.number("<Q", "the tensor count"), cursor.number("<Q", "the metadata count")


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    what = f"the value of {key!r}"
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY or depth >= _MAX_NESTING:
        problem = f"{cursor.path.name} is damaged: {what} has the type {kind}"
        raise model_error(cursor.path, f"{problem}{' nested too deeply' if kind == _ARRAY else ''}", _AGAIN)
    inner = cursor.number("<I", f"the element type of {key!r}")
    count = cursor.number("<Q", f"the length of {key!r}")
    cursor.limit(count, _MAX_ITEMS, f"{what}, an array of {count}")
    if inner in _SCALARS:
        width = struct.calcsize(_SCALARS[inner])
        cursor.require(count, width, f"{what}, an array of {count}")
        return list(struct.unpack(f"<{count}{_SCALARS[inner][1]}", cursor.take(count * width, what)))
    cursor.require(count, 8, f"{what}, an array of {count}")
    return [_read_value(cursor, inner, key, depth + 1) for _ in range(count)]


def _read_row(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of one tensor."""
    name = cursor.text(f"the name of tensor {index}")
    rank = cursor.number("<I", f"the rank of tensor {name!r}")
    if rank > _MAX_DIMENSIONS:
        what = (
            f"{cursor.path.name} is damaged: tensor {name!r} has {rank} dimensions, and {_MAX_DIMENSIONS} are the most"
        )
        raise model_error(cursor.path, what, _AGAIN)
    shape = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the shape of tensor {name!r}"))
    kind = cursor.number("<I", f"the type of tensor {name!r}")
    return name, tuple(reversed(shape)), kind, cursor.number("<Q", f"the offset of tensor {name!r}")


def _place(
    path: Path, rows: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int, size: int
) -> tuple[GgufTensor, ...]:
    """The rows as tensors with their places in the file, every place checked."""
    tensors = [_tensor(path, row, data_start, alignment) for row in rows]
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        twice = Counter(tensor.name for tensor in tensors).most_common(1)[0][0]
        raise model_error(path, f"{path.name} names tensor {twice!r} twice", _AGAIN)
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: tensor.start_byte):
        if tensor.start_byte < end:
            what = f"{path.name} is damaged: tensor {tensor.name!r} at byte {tensor.start_byte} overlaps the one before"
            raise model_error(path, what, _AGAIN)
        end = tensor.start_byte + tensor.bytes
        if end > size:
            what = f"{path.name} is truncated: tensor {tensor.name!r} ends at byte {end}, the file at {size}"
            raise model_error(path, f"{what} ({end - size} bytes of it are missing)", _AGAIN)
    padded = -(-end // alignment) * alignment
    if size > padded:
        what = f"{path.name} is too long: its tensors end at byte {end}, the file at {size}"
        raise model_error(path, what, _AGAIN)
    return tuple(tensors)


def _tensor(path: Path, row: tuple[str, tuple[int, ...], int, int], data_start: int, alignment: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, kind, offset = row
    try:
        type_name = GGMLQuantizationType(kind).name
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        what = f"{path.name} gives tensor {name!r} the element type {kind}, which is not known"
        raise model_error(path, what, "Download the file again, or use one quantised with a known type") from None
    elements = prod(shape)
    if elements >= 1 << 63 or (shape and shape[-1] % block_elements):
        what = f"{path.name} is damaged: tensor {name!r} of type {type_name} cannot have the shape {list(shape)}"
        raise model_error(path, what, _AGAIN)
    if offset % alignment:
        what = f"{path.name} is damaged: tensor {name!r} is at offset {offset}, not a multiple of {alignment}"
        raise model_error(path, what, _AGAIN)
    return GgufTensor(name, shape, type_name, data_start + offset, elements // block_elements * block_bytes)
