"""What a pool file says about itself, byte for byte, and what each block in it must prove before it is served.

    0      4096                 36864                          4096 + segment
    +------+--------------------+--------------------+---------+--------------------
    | pool | headers of slots   | block of slot 0    | ...  63 | headers of slots    ...
    |      | 0..63, 512 each    | in whole pages     |         | 64..127, 512 each
    +------+--------------------+--------------------+---------+--------------------

Owns encoding, checking and where each slot lies; opens nothing. Neighbouring slots of a segment are neighbours in the
file, headers and blocks alike, so a run of them is two reads; and a pool grows by segments without moving any block.
Invariant: `checked` accepts a header only as a whole, by its own checksum, and names the first thing that does not
match; the block's checksum is in the header and is compared by the reader. native/block_files.cpp proves whole batches
by the same bytes, and leaves to this module whatever it cannot prove.

Checksums are XXH3 of 128 bits: they are there for flipped bits, lost ends and torn writes. Against somebody who may
write the file no checksum without a secret helps; the file's mode keeps them out. It ran at 64 GB/s a core where CRC-32
ran at 4.3, SHA-256 at 1.8 and BLAKE2b at 0.95, and what a disk is asked for is mostly in the page cache. What names
things is SHA-256: keys, and the digests of an identity.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Literal

import xxhash

from octavo.memory.keys import packed

Buffer = bytes | bytearray | memoryview

Reason = Literal[
    "absent",
    "wrong_version",
    "wrong_fingerprint",
    "wrong_layout",
    "wrong_key",
    "wrong_length",
    "truncated",
    "bad_header",
    "bad_checksum",
    "io_error",
    "disk_full",
    "short_write",
    "no_room",
    "busy",
    "closed",
]
"""Why a block was not served, or not kept."""

POOL_MAGIC, RECORD_MAGIC = b"octavoPL", b"octavoBK"
VERSION = 3
POOL_BYTES = 4096
HEADER_BYTES = 512
KEY_BYTES = 32
CHECKSUM_BYTES = 16
PAGE_BYTES = 4096
SEGMENT_SLOTS = 64

_OWN = HEADER_BYTES - CHECKSUM_BYTES
"""Where a header's own checksum lies: of all before it."""
_POOL = struct.Struct("<8sIIQ")
_RECORD = struct.Struct("<8sII32s32s32sQQ16s")
"""Magic, version, zero, key, fingerprint, layout, payload length, age, payload checksum."""


def checksum(data: Buffer) -> bytes:
    """Of what an identity is made of, and of the head of a pool."""
    return hashlib.sha256(data).digest()


def block_checksum(data: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a block on disk must share with the engine that reads it, as two digests."""

    fingerprint: bytes
    layout: bytes

    @classmethod
    def of(cls, fingerprint: str, signature: str, group: str) -> Identity:
        """Of a model's fingerprint and one group of a layout: two groups may have blocks of one size and one key."""
        return cls(checksum(fingerprint.encode()), checksum(packed(signature.encode(), group.encode())))


@dataclass(frozen=True, slots=True)
class Header:
    key: bytes
    identity: Identity
    payload_bytes: int
    age: int
    """Grows with every write of a pool: after a restart, blocks are evicted in this order."""
    payload_checksum: bytes

    def encoded(self) -> bytes:
        fields = _RECORD.pack(
            RECORD_MAGIC,
            VERSION,
            0,
            self.key,
            self.identity.fingerprint,
            self.identity.layout,
            self.payload_bytes,
            self.age,
            self.payload_checksum,
        )
        before = fields.ljust(_OWN, b"\0")
        return before + block_checksum(before)

    def mismatch(self, identity: Identity, payload_bytes: int) -> Reason | None:
        """Why a block with this header, itself undamaged, is not one that this engine may read."""
        if self.identity.fingerprint != identity.fingerprint:
            return "wrong_fingerprint"
        if self.identity.layout != identity.layout:
            return "wrong_layout"
        return None if self.payload_bytes == payload_bytes else "wrong_length"


def checked(raw: Buffer) -> Header | Reason:
    """The header in `raw`, or why there is none."""
    data = bytes(raw)
    if len(data) < HEADER_BYTES:
        return "truncated"
    if not any(data):
        return "absent"
    magic, version, _, key, fingerprint, layout, length, age, payload_checksum = _RECORD.unpack_from(data)
    if magic != RECORD_MAGIC or data[_OWN:] != block_checksum(data[:_OWN]):
        return "wrong_version" if _is_of_version_2(data) else "bad_header"
    if version != VERSION:
        return "wrong_version"
    return Header(key, Identity(fingerprint, layout), length, age, payload_checksum)


def _is_of_version_2(data: bytes) -> bool:
    """Its headers had a SHA-256 of their own, behind the same fields."""
    fields = data[: _RECORD.size]
    sound = data[_RECORD.size :] == checksum(fields).ljust(HEADER_BYTES - _RECORD.size, b"\0")
    return sound and _RECORD.unpack(fields)[:2] == (RECORD_MAGIC, 2)


def heading(identity: Identity, payload_bytes: int) -> bytes:
    """A header as it is for every block of a store: without key, age and checksums."""
    return (
        Header(bytes(KEY_BYTES), identity, payload_bytes, 0, bytes(CHECKSUM_BYTES))
        .encoded()[:_OWN]
        .ljust(HEADER_BYTES, b"\0")
    )


def disproved(head: Buffer, key: bytes, identity: Identity, block: memoryview) -> Reason | None:
    """Why what was read, where this block was published, is not to be served as it; None if it is."""
    header = checked(head)
    if not isinstance(header, Header):
        return "bad_header" if header == "absent" else header  # it was here: zeros are damage
    reason = header.mismatch(identity, len(block))
    if reason is None and header.key != key:
        return "wrong_key"
    if reason is None and block_checksum(block) != header.payload_checksum:
        return "bad_checksum"
    return reason


@dataclass(frozen=True, slots=True)
class Places:
    """Where slots lie in a file whose blocks start every `stride` bytes of a segment."""

    stride: int

    @classmethod
    def of(cls, block_bytes: int) -> Places:
        return cls(-(-block_bytes // PAGE_BYTES) * PAGE_BYTES)

    def header(self, slot: int) -> int:
        return POOL_BYTES + slot // SEGMENT_SLOTS * self._segment + slot % SEGMENT_SLOTS * HEADER_BYTES

    def block(self, slot: int) -> int:
        first = POOL_BYTES + slot // SEGMENT_SLOTS * self._segment + SEGMENT_SLOTS * HEADER_BYTES
        return first + slot % SEGMENT_SLOTS * self.stride

    def file_bytes(self, slots: int) -> int:
        return self.block(slots - 1) + self.stride if slots else POOL_BYTES

    def slots_in(self, file_bytes: int) -> int:
        """How many slots a file of that size has room for."""
        segments, rest = divmod(max(0, file_bytes - POOL_BYTES), self._segment)
        return segments * SEGMENT_SLOTS + max(0, rest - SEGMENT_SLOTS * HEADER_BYTES) // self.stride

    @property
    def _segment(self) -> int:
        return SEGMENT_SLOTS * (HEADER_BYTES + self.stride)


def encoded_pool(stride: int) -> bytes:
    fields = _POOL.pack(POOL_MAGIC, VERSION, 0, stride)
    return (fields + checksum(fields)).ljust(POOL_BYTES, b"\0")


def pool_stride(raw: bytes) -> int | Reason | None:
    """Of the pool that begins so; a reason if it is a pool that cannot be read; None if it is something else.

    A file of zeros, or one whose creation was cut short, is a pool that holds nothing.
    """
    if raw[:8] == POOL_MAGIC:
        if len(raw) < POOL_BYTES:
            return "bad_header"
        _, version, _, stride = _POOL.unpack_from(raw)
        if stride >= PAGE_BYTES and raw == encoded_pool(stride):
            return int(stride)
        return "wrong_version" if version != VERSION else "bad_header"
    written = raw.rstrip(b"\0")
    return "absent" if POOL_MAGIC.startswith(written) else None
