"""A small pool on disk, and system calls that fail, cut short or die as told."""

from __future__ import annotations

import os
import random

from octavo.runtime.disk import DiskPool
from octavo.runtime.disk_files import RealSyscalls
from octavo.runtime.disk_format import Identity, Places, checksum

SIZE = 700
PLACES = Places.of(SIZE)
MODEL = Identity.of("model a", "layout a", "full")


def key(n):
    return checksum(b"key %d" % n)


def payload(n, version=0):
    return random.Random(n * 1000 + version).randbytes(SIZE)


def opened(path, slots=4, identity=MODEL, size=SIZE, syscalls=None):
    return DiskPool(path, identity, size, Places.of(size).file_bytes(slots), syscalls)


def read(pool, n):
    into = bytearray(pool.block_bytes)
    return pool.get(key(n), into) or bytes(into)


def flip(path, at, mask=1):
    """Change a byte of the file, behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def abandon(pool):
    """What is left of a pool whose process has died."""
    os.close(pool.file._descriptor)


class Killed(BaseException):
    """The process ends here."""


class Faulty(RealSyscalls):
    """Fails, cuts short, or dies, as it is told before a call."""

    def __init__(self):
        self.write_error = self.read_error = self.die_after = None
        self.most = None
        self.written = 0
        self.calls = 0

    def pwritev(self, descriptor, buffers, offset):
        data = b"".join(buffers)
        if self.write_error is not None:
            raise OSError(self.write_error, "injected")
        self.calls += 1
        if self.most is not None:
            data = data[: self.most]
        if self.die_after is not None and self.written + len(data) > self.die_after:
            super().pwritev(descriptor, [data[: self.die_after - self.written]], offset)
            raise Killed
        self.written += len(data)
        return super().pwritev(descriptor, [data], offset)

    def preadv(self, descriptor, buffers, offset):
        if self.read_error is not None:
            raise OSError(self.read_error, "injected")
        if self.most:
            buffers = [buffers[0][: self.most]]
        return super().preadv(descriptor, buffers, offset)
