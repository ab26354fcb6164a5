"""Tokens of prompts that nobody wrote: the same key gives the same tokens, always.

Owns the arithmetic: splitmix64 of (key, position), modulo the vocabulary. The last token id is left free: the simulated
worker uses it to end a sequence.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Of the spaces that keys are drawn from, so that a block of a trace never equals a prompt of its own.
OWN_SPACE, BLOCK_SPACE, PREFIX_SPACE = 1 << 56, 2 << 56, 3 << 56


def eos_of(vocab_size: int) -> int:
    """The token that ends a sequence; no prompt has it."""
    return vocab_size - 1


def tokens_of(keys: npt.NDArray[np.int64], each: int, vocab_size: int) -> Int32Array:
    """int32[len(keys) * each]: so many tokens of each key, one key after another."""
    first = _mixed(keys.astype(np.uint64))
    numbers = _mixed(first[:, None] + np.arange(each, dtype=np.uint64)[None, :])
    return (numbers % np.uint64(vocab_size - 1)).astype(np.int32).reshape(-1)


def _mixed(x: UInt64Array) -> UInt64Array:
    """The finalizer of Steele, Lea and Flood (2014), modulo 2^64."""
    z = x + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))
