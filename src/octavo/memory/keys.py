"""Content identity of full blocks: a cryptographic hash, chained from the start of the sequence.

    root  = H(domain, model fingerprint, block size, cache salt, adapter)
    key_i = H(domain, key_(i-1), token ids of block i)

Every field is prefixed with its length, so that no two lists of fields read the same. Nothing of the process or
the machine goes in: the same text has the same keys everywhere. Keys find blocks; `prefix` compares tokens before
one serves, so that even a hash that collides cannot serve wrong state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from octavo.memory.values import Int32

Digest = Callable[[bytes], bytes]

TOKEN_BYTES = 4
_ROOT, _BLOCK = b"octavo root 1", b"octavo block 1"


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def in_process(data: bytes) -> bytes:
    """Python's own hash, keyed anew in each process: for keys that nobody else sees and nobody can aim at."""
    return hash(data).to_bytes(8, "little", signed=True)


IDENTIFYING: tuple[Digest, ...] = (sha256, in_process)
"""Digests that give two texts one key so rarely that a key stands for its text. Even then tokens are compared."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """What two requests must have in common before a block of one may serve the other, salts aside."""

    fingerprint: str
    """Of the weights, their dtype, and how blocks are laid out."""
    block_tokens: int
    digest: Digest = sha256

    def root(self, salt: str = "", adapter: str = "") -> tuple[bytes, bytes]:
        """The key that all chains of this salt and adapter start from, and what was hashed into it."""
        said = packed(
            _ROOT, self.fingerprint.encode(), str(self.block_tokens).encode(), salt.encode(), adapter.encode()
        )
        return self.digest(said), said

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        return self.digest(packed(_BLOCK, parent, tokens))

    def children(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """The keys of these full blocks, one after the other: `child` of each, after the one before."""
        keys: list[bytes] = []
        width, digest, first = TOKEN_BYTES * self.block_tokens, self.digest, packed(_BLOCK)
        length = width.to_bytes(8, "little")
        size = len(parent).to_bytes(8, "little")  # a digest's keys are equally long, roots among them
        for start in range(0, len(tokens), width):
            parent = digest(b"".join((first, size, parent, length, tokens[start : start + width])))
            keys.append(parent)
        return keys


class Chain:
    """The keys of one sequence's full blocks, each hashed once."""

    def __init__(self, space: KeySpace, salt: str = "", adapter: str = "") -> None:
        self.space = space
        self.root = space.root(salt, adapter)
        self.keys: list[bytes] = []

    def extend(self, tokens: Int32, first_block: int = 0) -> None:
        """Add what is lacking; `tokens` are those of block `first_block` and on, of which no key before is lacking."""
        size, lacking = self.space.block_tokens, len(self.keys) - first_block
        full = len(tokens) // size
        if lacking >= full:
            return
        last = self.keys[-1] if self.keys else self.root[0]
        self.keys.extend(self.space.children(last, token_bytes(tokens[lacking * size : full * size])))


def packed(*fields: bytes) -> bytes:
    parts: list[bytes] = []
    for field in fields:
        parts += (len(field).to_bytes(8, "little"), field)
    return b"".join(parts)


def token_bytes(tokens: Int32) -> bytes:
    """Token ids as little-endian 32-bit integers, whatever the machine."""
    return tokens.astype("<i4", copy=False).tobytes()
