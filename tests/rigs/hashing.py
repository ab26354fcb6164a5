"""The arithmetic of the pretend model: the hash of a history.

Owns pure functions on 64-bit integers. Knows nothing of pages, rows, plans or sockets. The oracle and the executor
share this module and `sampling`, and nothing else.
"""

from hashlib import sha256

import numpy as np

MASK = (1 << 64) - 1
# The hash of the empty history.
ROOT = 0x7A4DE3B1C95F0826


def mix(value: int) -> int:
    """splitmix64, as worker.proto defines MIX."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix_array(values: np.ndarray) -> np.ndarray:
    """`mix` of uint64[n]."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def salt_of(version: str) -> int:
    """What the weights of this version change in each hash; 0 for those of the start."""
    return int.from_bytes(sha256(version.encode()).digest()[:8], "little") if version else 0


def extend(prefix: int, token: int, salt: int = 0) -> int:
    """The hash of a history with one more token."""
    return mix(prefix ^ mix(token + 1) ^ salt)


def extend_array(prefixes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`extend` of uint64[n] hashes by int32[n] tokens."""
    return mix_array(prefixes ^ mix_array(tokens.astype(np.uint64) + np.uint64(1)))
