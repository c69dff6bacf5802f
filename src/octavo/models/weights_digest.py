"""Names the weights of a checkpoint to the last bit, for what outlives the process that loaded them.

Owns the digest of whole weight files and the memory of digests already computed. State on a disk may be found by a
later process with another checkpoint: a sample of the weights would take one with a few edited rows for the same.
A digest is remembered with the file's size, inode and times (the time of its last change, which no program can set
back, among them), so that it is computed once for a file and not at each start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from octavo.models.cache_directory import cache_directory
from octavo.models.weight_files import open_for_reading

_FOLDER = "digests"
_READERS = 4


def weights_digest(files: Sequence[Path]) -> str:
    """SHA-256 over the SHA-256 of each file, in the order of their names; hexadecimal.

    Raises `ModelError` where a file cannot be read.
    """
    ordered = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(min(_READERS, max(1, len(ordered)))) as readers:
        digests = list(readers.map(_digest_of, ordered))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest_of(path: Path) -> str:
    note = _note_of(path)
    with open_for_reading(path) as file:
        state = _state(file.fileno())
        known = _remembered(note, state)
        if known is not None:
            return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(file.fileno()) == state:  # else somebody wrote to it meanwhile
            _remember(note, state, digest)
    return digest


def _state(descriptor: int) -> list[int]:
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _note_of(path: Path) -> Path:
    return cache_directory() / _FOLDER / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"


def _remembered(note: Path, state: list[int]) -> str | None:
    try:
        told = json.loads(note.read_bytes())
        digest = told["sha256"] if told["state"] == state else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return digest if isinstance(digest, str) else None


def _remember(note: Path, state: list[int], digest: str) -> None:
    """Whoever cannot write there computes the digest again next time."""
    whole = note.with_suffix(f".{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps({"state": state, "sha256": digest}))
        whole.replace(note)
    except OSError:
        with suppress(OSError):
            whole.unlink()
