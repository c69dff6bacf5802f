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

_ROOT, _BLOCK = b"octavo root 1", b"octavo block 1"


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


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


class Chain:
    """The keys of one sequence's full blocks, each hashed once."""

    def __init__(self, space: KeySpace, salt: str = "", adapter: str = "") -> None:
        self.space = space
        self.root = space.root(salt, adapter)
        self.keys: list[bytes] = []

    def extend(self, tokens: Int32, first_block: int = 0) -> None:
        """Add what is lacking; `tokens` are those of block `first_block` and on, of which no key before is lacking."""
        size = self.space.block_tokens
        for index in range(len(self.keys), first_block + len(tokens) // size):
            block = tokens[(index - first_block) * size : (index - first_block + 1) * size]
            self.keys.append(self.space.child(self.keys[-1] if self.keys else self.root[0], token_bytes(block)))


def packed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def token_bytes(tokens: Int32) -> bytes:
    """Token ids as little-endian 32-bit integers, whatever the machine."""
    return tokens.astype("<i4").tobytes()
