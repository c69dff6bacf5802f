"""The one random number behind every sampled token, as a pure function of (seed, choice, position).

Owns the map from those three integers to a double in [0, 1); it keeps no state and draws nothing
else. It is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), written with integer operations alone: the value is the same on every machine,
in every batch and after every preemption. The seed is the key; position and choice are the counter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

_UInt64 = npt.NDArray[np.uint64]
_Quad = tuple[_UInt64, _UInt64, _UInt64, _UInt64]


def uniforms(
    seeds: npt.NDArray[np.int64], choices: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One uniform double in [0, 1) for every row, with 53 random bits.

    `seeds` may be negative; `choices` and `positions` count from 0. The arrays broadcast.

    >>> uniforms(np.array([7]), np.array([0]), np.array([12])) == uniforms(np.array([7]), np.array([0]), np.array([12]))
    array([ True])
    """
    seed, choice, position = (np.asarray(a, dtype=np.int64).view(np.uint64) for a in (seeds, choices, positions))
    seed, choice, position = np.broadcast_arrays(seed, choice, position)
    counter = (position & _LOW, position >> _HALF, choice & _LOW, choice >> _HALF)
    first, second, _, _ = philox(counter, (seed & _LOW, seed >> _HALF))
    bits = (first << np.uint64(21)) | (second >> np.uint64(11))
    return np.asarray(bits.astype(np.float64) * 2.0**-53)


def philox(counter: _Quad, key: tuple[_UInt64, _UInt64]) -> _Quad:
    """Philox4x32-10: four 32-bit words of a counter and two of a key give four random 32-bit words.

    Words are held in uint64, where the product of two of them is exact.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
