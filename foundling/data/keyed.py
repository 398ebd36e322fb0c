"""A keyed bijection of 0..size-1: shuffling as a function, with no list of what was drawn.

A Feistel network permutes the smallest square power of two that holds `size`, and walking the
cycle (apply again until the value falls inside) restricts it to exactly `size` values (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). Rejected: a stored permutation (memory
grows with the data, and seeking needs all of it) and a linear congruence (neighbours stay
neighbours).
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
_FIRST = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: an odd number of no structure
_SECOND = np.uint64(0xD6E8FEB86659FD93)  # any other odd number with well-spread bits would do
_HALF_WORD = np.uint64(32)


@lru_cache(maxsize=1024)
def round_keys(*parts: str | int) -> NDArray[np.uint64]:
    """The keys of the network, from whatever names this shuffle."""
    text = "\x00".join(map(str, parts)).encode()
    digest = hashlib.blake2b(text, digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(index: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where each index (all within 0..size-1) goes; a bijection for every size and key.

    `keys` is [ROUNDS], or [ROUNDS, n] to give each of the n indices a shuffle of its own.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    result = index.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        moved = _network(result[outside], half, keys if keys.ndim == 1 else keys[:, outside])
        result[outside] = moved
        outside = outside[moved >= np.uint64(size)]
    return result.astype(np.int64)


def _network(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass over 2 * half bits; invertible whatever the mixing in the middle does."""
    shift, keep = np.uint64(half), np.uint64((1 << half) - 1)
    top = np.uint64(64 - half)
    left, right = value >> shift, value & keep
    for key in keys:
        mixed = (right ^ key) * _FIRST
        mixed ^= mixed >> _HALF_WORD
        mixed *= _SECOND
        left, right = right, left ^ (mixed >> top)
    return (left << shift) | right
