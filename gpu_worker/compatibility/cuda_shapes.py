"""Shapes of attention that are known not to compile, or not to start, on a CUDA device.

Owns these limits, found by compiling the generated kernels for sm_90 with torch 2.11 and Triton 3.6. A model with such
a layer is refused before its weights are loaded. Asks no device: every figure is an argument.
"""

import torch

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelRefused

# The query heads of a group are the query rows of the decode kernel. A kernel for 65 or more is compiled for 128 rows
# and takes gigabytes of local memory; from 128 on FlexAttention has no decode kernel.
MAX_GROUP = 64
# For larger heads the decode kernel spills float32 registers until its local memory does not fit beside the pool.
MAX_FLOAT32_HEAD_DIM = 256


def check_cuda_shapes(layers: LayerMap, dtype: torch.dtype) -> None:
    """Raises ModelRefused, which names the layer, the limit and a remedy."""
    for layer in layers.layers:
        kind = layer.kind
        if kind.group > MAX_GROUP:
            raise ModelRefused(
                f"{layer.name} has {kind.group} query heads per KV head; the decode kernel for CUDA takes at most "
                f"{MAX_GROUP}; device cpu has no such limit"
            )
        if dtype.itemsize > 2 and kind.head_dim > MAX_FLOAT32_HEAD_DIM:
            name = str(dtype).removeprefix("torch.")
            raise ModelRefused(
                f"{layer.name} has heads of {kind.head_dim} dimensions; the decode kernel for CUDA takes at most "
                f"{MAX_FLOAT32_HEAD_DIM} in {name}; dtype bfloat16 or device cpu has no such limit"
            )
