"""A directory that several processes fill with files of their own, and how much room is left in it.

    lock -> room counted, made if need be by giving up files of oldest use -> files made, of their full size -> unlock
         -> written, each by its maker alone -> renamed to what they are

Owns the lock, the count, what files are called until they are whole, and their removal; knows nothing of their
content. Files that are being written count like the others, so the bound holds whoever writes and whoever dies.
Invariant: no file is touched whose name is not one that this module or its caller's pattern gives, and no `OSError`
passes these calls once the directory is open.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.runtime.disk_files import FIELD, reason_of
from octavo.runtime.disk_format import Reason

PATIENCE_SECONDS = 1.0
"""With whoever holds the lock: it is held for a look through the directory at most, unless its holder is stopped."""
STALE_SECONDS = 900.0
"""After which a file that nobody finishes is a dead process's."""

_LOCK, _PART = ".lock", re.compile(r"\.part-[0-9a-f]{16}-[0-9]+")
_COUNT = struct.Struct("<8sQ")
_MAGIC = b"octavoRM"


class File(NamedTuple):
    used: int
    """When, in nanoseconds; files of one time go by name."""
    name: str
    size: int


class SharedRoom:
    """At most `capacity_bytes` of files called by `pattern` in `folder`, which is made if absent.

    Raises `ConfigError` when the folder is no directory, another user's, or open to others for writing.
    """

    def __init__(self, folder: Path, pattern: re.Pattern[str], capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.evictions = 0
        self._pattern = pattern
        self._token = secrets.token_hex(8)
        self._parts = 0
        self._descriptor = _open_folder(folder)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(_LOCK, flags, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(FIELD, str(folder), f"cannot be written: {error.strerror}") from None

    @property
    def descriptor(self) -> int:
        """Of the directory, for opening files in it."""
        return self._descriptor

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._descriptor)

    def make(self, count: int, size: int) -> list[tuple[str, int]] | Reason:
        """`count` new files of `size` bytes, open for writing and not found yet; else why not, and then none."""
        try:
            with self._locked() as mine:
                return self._make(count, size) if mine else "busy"
        except OSError as error:
            return reason_of(error)

    def publish(self, part: str, name: str) -> Reason | None:
        """From here on the file is found by its name, in place of one that may have had it."""
        try:
            os.rename(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError as error:
            self.remove(part)
            return reason_of(error)
        return None

    def remove(self, name: str) -> bool:
        """False if it was gone already, or cannot go. What the count keeps of it is mended by the next look."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except OSError:
            return False
        return True

    def files(self) -> list[File]:
        """Those whose name is of the pattern, oldest use first."""
        return sorted(self._look(self._pattern))

    def _make(self, count: int, size: int) -> list[tuple[str, int]] | Reason:
        used, need = self._counted(), count * size
        if used is None or used + need > self.capacity_bytes:
            used = self._sweep(need, size)
            if used + need > self.capacity_bytes:
                self._count(used)
                return "no_room"
        made: list[tuple[str, int]] = []
        try:
            for _ in range(count):
                self._parts += 1
                part = f".part-{self._token}-{self._parts}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                made.append((part, os.open(part, flags, 0o600, dir_fd=self._descriptor)))
                os.ftruncate(made[-1][1], size)  # counted at once; blocks that nobody flushes may never reach the disk
        except OSError:
            for part, descriptor in made:
                os.close(descriptor)
                self.remove(part)
            raise
        self._count(used + need)
        return made

    def _sweep(self, need: int, size: int) -> int:
        """Look through the directory and give up what is old until `need` bytes fit; what is used then."""
        parts = list(self._look(_PART))
        horizon = time.time_ns() - int(STALE_SECONDS * 1e9)
        left = [part for part in parts if part.used > horizon or not self.remove(part.name)]
        files = self.files()
        used = sum(file.size for file in (*files, *left))
        goal = self.capacity_bytes
        if used + need > goal:
            goal -= goal // 32 // size * size  # some more than needed, so as not to look again at once
        for file in files:
            if used + need <= goal:
                break
            if self.remove(file.name):
                self.evictions += 1
                used -= file.size
        return used

    def _look(self, pattern: re.Pattern[str]) -> Iterator[File]:
        with os.scandir(self._descriptor) as entries:
            for entry in entries:
                if pattern.fullmatch(entry.name):
                    with suppress(OSError):  # gone since
                        facts = entry.stat(follow_symlinks=False)
                        yield File(facts.st_mtime_ns, entry.name, facts.st_size)

    def _counted(self) -> int | None:
        raw = os.pread(self._lock, _COUNT.size, 0)
        if len(raw) != _COUNT.size or raw[:8] != _MAGIC:
            return None
        return int(_COUNT.unpack(raw)[1])

    def _count(self, used: int) -> None:
        os.pwrite(self._lock, _COUNT.pack(_MAGIC, used), 0)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    yield False
                    return
                time.sleep(0.001)
        try:
            yield True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _open_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(FIELD, str(folder), f"cannot be opened as a directory: {error.strerror}") from None
    facts = os.fstat(descriptor)
    remedy = None
    if facts.st_uid != os.geteuid():
        remedy = "belongs to another user, who could read or change what is kept there"
    elif stat.S_IMODE(facts.st_mode) & 0o022:
        remedy = "may be written by others, who could change what is kept there; chmod 700 it"
    if remedy is not None:
        os.close(descriptor)
        raise ConfigError(FIELD, str(folder), remedy)
    return descriptor
