"""The largest logit of each row and whether the row is finite: on a CPU by one pass of a native kernel.

Torch needs two passes, of which the one for the index takes five times as long as reading the row.
"""

from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from gpu_worker.native.calls import NativeFunction
from gpu_worker.native.library import native_library

_TYPES = (torch.float32, torch.bfloat16)
# Tokens are 32-bit numbers in the kernel.
_MOST_TOKENS = (1 << 31) - 1


@cache
def _kernel() -> NativeFunction | None:
    library = native_library()
    if library is None:
        return None
    return library.function("tandem_greedy", c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32)


def greedy_tokens(logits: Tensor) -> Tensor:
    """Returns int64 [S]: the first of the largest logits of each row of [S, V]; -1 if a logit is not finite."""
    num_rows, vocab_size = logits.shape
    if logits.is_cpu and logits.dtype in _TYPES and logits.stride(1) == 1 and 0 < vocab_size < _MOST_TOKENS:
        kernel = _kernel()
        if kernel is not None:
            tokens = torch.empty(num_rows, dtype=torch.int64)
            kernel(
                logits.data_ptr(), tokens.data_ptr(), num_rows, vocab_size, logits.stride(0),
                logits.dtype is torch.bfloat16, torch.get_num_threads(),
            )  # fmt: skip
            return tokens
    # A sum is finite if every term is (logits are far from overflow); this takes one fast pass.
    usable = logits.sum(-1, dtype=torch.float32).isfinite()
    return logits.argmax(-1).masked_fill_(~usable, -1)
