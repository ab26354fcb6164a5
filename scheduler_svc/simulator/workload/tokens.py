"""Synthetic tokens: the same key always gives the same tokens.

Owns the arithmetic: splitmix64 of (key, position), modulo the vocabulary. No prompt contains the last token id, which
is the simulated EOS.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array
from tandem_contract.row_checksum import mix

# Key spaces. They keep the blocks of a trace apart from tokens that belong to one prompt alone.
OWN_SPACE, BLOCK_SPACE, PREFIX_SPACE = 1 << 56, 2 << 56, 3 << 56


def eos_of(vocab_size: int) -> int:
    """Returns the token that ends a sequence. No prompt contains it."""
    return vocab_size - 1


def tokens_of(keys: npt.NDArray[np.int64], each: int, vocab_size: int) -> Int32Array:
    """Returns int32[len(keys) * each]: `each` tokens per key, one key after another."""
    first = mix(keys.astype(np.uint64))
    numbers = mix(first[:, None] + np.arange(each, dtype=np.uint64)[None, :])
    return (numbers % np.uint64(vocab_size - 1)).astype(np.int32).reshape(-1)
