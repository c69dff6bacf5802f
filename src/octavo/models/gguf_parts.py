"""Joins the parts of a split GGUF into one file in octavo's cache, because Transformers reads only whole ones.

Each part is checked on its own first, and that the parts belong together. The invariant: the joined file appears
under its name only complete; the same parts (names, sizes, weights) are never joined twice.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

from octavo.models.gguf_file import GgufHeader, GgufTensor, read_gguf
from octavo.models.weight_files import model_error, open_for_reading, read_bytes

_PIECE_BYTES = 1 << 22
_SPLIT = "split."


def joined(parts: tuple[Path, ...], cache: Path) -> Path:
    """The one file that the parts make up, joined now if the cache does not hold it."""
    from filelock import FileLock

    headers = [read_gguf(part, part=True) for part in parts]
    _check_together(parts, headers)
    target = cache / "joined" / f"{parts[0].name.rsplit('-', 3)[0]}-{_identity(headers)[:16]}.gguf"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.exists():
                passing = target.with_suffix(f".{os.getpid()}")
                try:
                    with passing.open("wb") as out:
                        _write(headers, out)
                    passing.rename(target)
                finally:
                    passing.unlink(missing_ok=True)
    except OSError as error:
        what = f"the {len(parts)} parts of {parts[0].name} cannot be joined in {target.parent} ({error})"
        remedy = "Free as much space there as the parts take, or set OCTAVO_CACHE to a directory on another disk"
        raise model_error(parts[0], what, remedy) from error
    return target


def _check_together(parts: tuple[Path, ...], headers: list[GgufHeader]) -> None:
    seen: dict[str, Path] = {}
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        told = (header.metadata.get("split.no", number), header.metadata.get("split.count", len(parts)))
        if told != (number, len(parts)):
            what = f"{part.name} says inside that it is part {told[0]} (counted from 0) of {told[1]}"
            raise model_error(part, what, "Restore the parts' original names, or fetch them again")
        for tensor in header.tensors:
            if seen.setdefault(tensor.name, part) is not part:
                what = f"tensor {tensor.name!r} is in two parts: {seen[tensor.name].name} and {part.name}"
                raise model_error(part, what, "Fetch the parts again, from one revision")
    total = headers[0].metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        what = f"{parts[0].name} says that the model has {total} tensors, and its parts hold {len(seen)}"
        raise model_error(parts[0], what, "Fetch the parts again, from one revision")


def _identity(headers: list[GgufHeader]) -> str:
    """Of the parts' headers and a piece of each tensor: other weights, another name."""
    digest = hashlib.sha256()
    for header in headers:
        with open_for_reading(header.path) as file:
            digest.update(read_bytes(header.path, file, min((t.start_byte for t in header.tensors), default=4096)))
            for tensor in header.tensors:
                file.seek(tensor.start_byte + max(0, tensor.bytes - 1024) // 2)
                digest.update(read_bytes(header.path, file, min(tensor.bytes, 1024)))
    return digest.hexdigest()


def _write(headers: list[GgufHeader], out: BinaryIO) -> None:
    """The first part's metadata without its split fields, one table of all tensors, then their bytes."""
    first, alignment = headers[0], headers[0].alignment
    kept = [span for key, span in first.spans.items() if not key.startswith(_SPLIT)]
    tensors = [(header, tensor) for header in headers for tensor in header.tensors]
    out.write(b"GGUF" + struct.pack("<IQQ", first.version, len(tensors), len(kept)))
    with open_for_reading(first.path) as file:
        for start, end in kept:
            file.seek(start)
            out.write(read_bytes(first.path, file, end - start))
    offset = 0
    for _, tensor in tensors:
        out.write(_row(tensor, offset))
        offset += -(-tensor.bytes // alignment) * alignment
    out.write(b"\0" * (-out.tell() % alignment))
    for header, tensor in tensors:
        with open_for_reading(header.path) as file:
            _copy(file, tensor, out)
        out.write(b"\0" * (-tensor.bytes % alignment))


def _copy(file: BinaryIO, tensor: GgufTensor, out: BinaryIO) -> None:
    file.seek(tensor.start_byte)
    left = tensor.bytes
    while left:
        piece = file.read(min(left, _PIECE_BYTES))
        out.write(piece)
        left -= len(piece)
        if not piece:
            raise OSError(f"tensor {tensor.name} ended early")


def _row(tensor: GgufTensor, offset: int) -> bytes:
    from gguf import GGMLQuantizationType

    name = tensor.name.encode()
    shape = tuple(reversed(tensor.shape))
    return (
        struct.pack("<Q", len(name)) + name
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", GGMLQuantizationType[tensor.type_name].value, offset)
    )  # fmt: skip
