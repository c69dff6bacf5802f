"""A few slots on disk, and system calls that fail, cut short or die as told."""

from __future__ import annotations

import os
import random

from octavo.runtime.disk_files import RealSyscalls
from octavo.runtime.disk_format import Identity, Places, checksum
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import Placed

SIZE = 700
PLACES = Places.of(SIZE)
MODEL = Identity.of("model a", "layout a", "full")


def key(n):
    return checksum(b"key %d" % n)


def payload(n, version=0):
    return random.Random(n * 1000 + version).randbytes(SIZE)


def opened(path, slots=4, identity=MODEL, size=SIZE, syscalls=None):
    return DiskSlots(path, identity, size, Places.of(size).file_bytes(slots), syscalls)


def put(disk, n, version=0):
    return disk.write([Placed(n % disk.slots, key(n), payload(n, version))])[0]


def read(disk, n):
    """Block n from wherever it lies, or why not."""
    into = bytearray(disk.block_bytes)
    slot = dict(disk.stored()).get(key(n), n % disk.slots)
    return disk.read([Placed(slot, key(n), into)])[0] or bytes(into)


def keys(disk):
    return [key for key, _ in disk.stored()]


def flip(path, at, mask=1):
    """Change a byte of the file, behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def abandon(disk):
    """As if its process had died."""
    os.close(disk._descriptor)


class Killed(BaseException):
    """The process ends here."""


class Faulty(RealSyscalls):
    """Fails, cuts short, or dies, as it is told before a call."""

    def __init__(self):
        self.write_error = self.read_error = self.die_after = None
        self.most = None
        self.written = 0
        self.calls = 0

    def whole_batches(self, block_bytes):
        return None

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
