"""Synthetic tokens: the same key always gives the same tokens.

Owns the arithmetic: splitmix64 of (key, position), modulo the vocabulary. No prompt contains the last token id, which
is the simulated EOS.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Key spaces. They keep the blocks of a trace apart from tokens that belong to one prompt alone.
OWN_SPACE, BLOCK_SPACE, PREFIX_SPACE = 1 << 56, 2 << 56, 3 << 56


def eos_of(vocab_size: int) -> int:
    """Returns the token that ends a sequence. No prompt contains it."""
    return vocab_size - 1


def tokens_of(keys: npt.NDArray[np.int64], each: int, vocab_size: int) -> Int32Array:
    """Returns int32[len(keys) * each]: `each` tokens per key, one key after another."""
    first = _mixed(keys.astype(np.uint64))
    numbers = _mixed(first[:, None] + np.arange(each, dtype=np.uint64)[None, :])
    return (numbers % np.uint64(vocab_size - 1)).astype(np.int32).reshape(-1)


def _mixed(x: UInt64Array) -> UInt64Array:
    """Applies the finalizer of Steele, Lea and Flood (2014), modulo 2^64."""
    z = x + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))
