"""The few system calls that a pool on disk makes, behind a seam where tests put full disks and failing reads.

Owns opening safely: mode 0600, a regular file of this user, never through a symbolic link (of the last part of the
path; the directories above are the user's choice), held by one process at a time. Knows nothing of records.
Invariant: `write_all` and `read_into` finish, or say why not; no `OSError` passes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ConfigError
from octavo.runtime.disk_batch import extension
from octavo.runtime.disk_format import Reason

FIELD = "disk_path"
LEAST_NATIVE_BYTES = 241
"""Of a block: the extension's checksum is made for no fewer."""


class Syscalls(Protocol):
    def whole_batches(self, block_bytes: int) -> Any | None:
        """The extension, whose calls move whole batches of such blocks; None where each is moved by the calls below."""

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int: ...


class RealSyscalls:
    """The operating system's."""

    def whole_batches(self, block_bytes: int) -> Any | None:
        return extension() if block_bytes >= LEAST_NATIVE_BYTES else None

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, buffers, offset)


def open_alone(path: Path) -> int:
    """A descriptor of the file, made if absent, locked until closed. Raises `ConfigError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        remedy = f"cannot be opened: {error.strerror}"
        if error.errno == errno.ELOOP:
            remedy = "is a symbolic link, which is not followed; name the file itself"
        raise ConfigError(FIELD, str(path), remedy) from None
    try:
        _take(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _take(descriptor: int, path: Path) -> None:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(FIELD, str(path), "is not a regular file; name one, or a path where nothing is yet")
    if facts.st_uid != os.geteuid():
        raise ConfigError(FIELD, str(path), "belongs to another user, who could read or change what is kept there")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        remedy = f"cannot be locked: {error.strerror}"
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            remedy = "is in use by another process; give each engine a file of its own, or stop the other"
        raise ConfigError(FIELD, str(path), remedy) from None
    os.fchmod(descriptor, 0o600)


def preallocate(descriptor: int, size: int, path: Path) -> None:
    """Make the file `size` bytes long, with room on the disk for all of them. Raises `ConfigError`."""
    try:
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        remedy = f"the file system does not grant that many bytes for {path}: {error.strerror}"
        raise ConfigError("disk_bytes", size, remedy) from None


def reason_of(error: OSError) -> Reason:
    return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error"


def write_all(calls: Syscalls, descriptor: int, buffers: Sequence[memoryview], offset: int) -> Reason | None:
    """Write every byte, one buffer after the other, in as many calls as it takes; else why not."""
    return _through(calls.pwritev, descriptor, buffers, offset, "short_write")


def read_into(calls: Syscalls, descriptor: int, buffers: Sequence[memoryview], offset: int) -> Reason | None:
    """Fill the buffers, one after the other; else why not."""
    return _through(calls.preadv, descriptor, buffers, offset, "truncated")


def _through(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    buffers: Sequence[memoryview],
    offset: int,
    at_end: Reason,
) -> Reason | None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        try:
            count = call(descriptor, left, offset)
        except OSError as error:
            return reason_of(error)
        if count <= 0:
            return at_end
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return None
