"""Shapes of attention that are known not to compile, or not to start, on a CUDA device.

Owns these limits, found by compiling the generated kernels for sm_90 with torch 2.11 and Triton 3.6. A model with such
a layer is refused before its weights are loaded. Asks no device: every figure is an argument.
"""

import torch

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelRefused

# The query heads of a group are the query rows of the decode kernel; from 128 on FlexAttention has none.
_MAX_GROUP = 127
# A kernel for 65 rows or more is compiled for 128. In float32, and for heads of more than 256 dimensions, it takes more
# shared memory than a card has, or gigabytes of local memory.
_MAX_GROUP_OF_LARGE_HEADS = 64
_MAX_SMALL_HEAD_BYTES = 512
# For larger heads the decode kernel spills float32 registers until its local memory does not fit beside the pool.
MAX_FLOAT32_HEAD_DIM = 256


def max_group(dtype: torch.dtype, head_dim: int) -> int:
    """The most query heads per KV head for which there is a decode kernel."""
    is_small = dtype.itemsize <= 2 and head_dim * dtype.itemsize <= _MAX_SMALL_HEAD_BYTES
    return _MAX_GROUP if is_small else _MAX_GROUP_OF_LARGE_HEADS


def check_cuda_shapes(layers: LayerMap, dtype: torch.dtype) -> None:
    """Raises ModelRefused, which names the layer, the limit and a remedy."""
    name = str(dtype).removeprefix("torch.")
    for layer in layers.layers:
        kind = layer.kind
        limit = max_group(dtype, kind.head_dim)
        if kind.group > limit:
            raise ModelRefused(
                f"{layer.name} has {kind.group} query heads per KV head; the decode kernel for CUDA takes at most "
                f"{limit} of {kind.head_dim} dimensions in {name}; device cpu has no such limit"
            )
        if dtype.itemsize > 2 and kind.head_dim > MAX_FLOAT32_HEAD_DIM:
            raise ModelRefused(
                f"{layer.name} has heads of {kind.head_dim} dimensions; the decode kernel for CUDA takes at most "
                f"{MAX_FLOAT32_HEAD_DIM} in {name}; dtype bfloat16 or device cpu has no such limit"
            )
