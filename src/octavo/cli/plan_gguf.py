"""A GGUF file as the source of a plan: its header read whole (all parts of a split one), its tensors counted.

Reads no weights and imports no torch. What the file's metadata do not say exactly is refused in
`geometry.from_gguf`, with the config as the remedy.
"""

from __future__ import annotations

from pathlib import Path

from octavo.geometry.from_gguf import config_from_gguf
from octavo.models.gguf_file import parts_of, read_gguf, refuse_missing_parts
from octavo.planner.source import Source, Tensor


def source_of_gguf(path: Path) -> Source:
    refuse_missing_parts(path)
    parts = parts_of(path)
    headers = [read_gguf(part, part=len(parts) > 1) for part in parts]
    tensors = tuple(
        Tensor(tensor.name, tensor.type_name, tensor.shape, tensor.bytes)
        for header in headers
        for tensor in header.tensors
    )
    name = headers[0].metadata.get("general.name")
    return Source(name if isinstance(name, str) and name else path.stem, config_from_gguf(headers[0].metadata),
                  tensors=tensors)  # fmt: skip
