"""Permutations that depend on a key and nothing else: not on numpy's version, nor on its state."""

import hashlib

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 [...] that spreads every bit (the splitmix64 finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def word(*key: int | str) -> int:
    """64 bits named by `key`."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")


def permutation(length: int, *key: int | str) -> np.ndarray:
    """The permutation int64 [length] named by `key`: the order of hashes of the indices."""
    start = np.array([word(*key)], np.uint64)
    # The odd step keeps the hash inputs distinct; multiplication wraps modulo 2**64.
    step = np.uint64(0x9E3779B97F4A7C15)
    hashes = mix(start + np.arange(length, dtype=np.uint64) * step)
    return np.argsort(hashes, kind="stable")
