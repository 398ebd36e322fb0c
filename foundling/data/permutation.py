"""A keyed bijection of 0..size-1: shuffling as a function, with no list of what was drawn.

A Feistel network permutes the smallest square power of two that holds `size`, and walking the
cycle (apply again until the value falls inside) restricts it to exactly `size` values (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). Rejected: a stored permutation (memory
grows with the data, and seeking needs all of it) and a linear congruence (neighbours stay
neighbours).
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
_FIRST = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: an odd number of no structure
_SECOND = np.uint64(0xD6E8FEB86659FD93)  # any other odd number with well-spread bits would do
_HALF_WORD = np.uint64(32)
Network = Callable[[NDArray[np.uint64], int, NDArray[np.uint64]], NDArray[np.uint64]]


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
    return _walk(index, size, keys, _network)


def unpermute(place: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which index `permute` sends to each place: the way back, just as short."""
    return _walk(place, size, keys, _network_back)


def _walk(
    index: NDArray[np.int64], size: int, keys: NDArray[np.uint64], network: Network
) -> NDArray[np.int64]:
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    result = index.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        moved = network(result[outside], half, keys if keys.ndim == 1 else keys[:, outside])
        result[outside] = moved
        outside = outside[moved >= np.uint64(size)]
    return result.astype(np.int64)


def _network(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass over 2 * half bits; invertible whatever the mixing in the middle does."""
    shift, keep = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & keep
    for key in keys:
        left, right = right, left ^ _mix(right, key, half)
    return (left << shift) | right


def _network_back(
    value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The same rounds, undone from the last to the first."""
    shift, keep = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & keep
    for key in keys[::-1]:
        left, right = right ^ _mix(left, key, half), left
    return (left << shift) | right


def _mix(word: NDArray[np.uint64], key: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = (word ^ key) * _FIRST
    mixed ^= mixed >> _HALF_WORD
    mixed *= _SECOND
    result: NDArray[np.uint64] = mixed >> np.uint64(64 - half)
    return result


def scattered(index: NDArray[np.int64], *parts: str | int) -> NDArray[np.uint64]:
    """A hash of 64 bits for each index, the same for ever."""
    left, right = round_keys(*parts)[:2]
    mixed = (index.astype(np.uint64) ^ left) * _FIRST
    for _ in range(2):
        mixed ^= mixed >> _HALF_WORD
        mixed = (mixed ^ right) * _SECOND
    result: NDArray[np.uint64] = mixed ^ (mixed >> _HALF_WORD)
    return result
