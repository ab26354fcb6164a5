"""Shapes of attention whose kernels are known not to compile, or not to start, on a CUDA device.

Owns these limits, found by compiling the generated kernels for sm_90 with torch 2.11 and Triton 3.6. A model with such
a layer is refused before its weights are loaded. Knows nothing of devices: every figure is an argument.
"""

import torch

from gpu_worker.attention.layers import LayerMap
from gpu_worker.checkpoint.files import ModelRefused

# Query heads of a group are the query rows of the decode kernel. From 65 on it is compiled for 128 rows and takes
# gigabytes of local memory; from 128 on FlexAttention has no decode kernel.
MAX_GROUP = 64
# Beyond, the decode kernel spills so many float32 registers that its local memory does not fit beside the pool.
MAX_FLOAT32_HEAD_DIM = 256


def check_cuda_shapes(layers: LayerMap, dtype: torch.dtype) -> None:
    """Raises ModelRefused, naming the layer, the limit and what would do instead."""
    for layer in layers.layers:
        kind = layer.kind
        if kind.group > MAX_GROUP:
            raise ModelRefused(
                f"{layer.name} has {kind.group} query heads per KV head; the decode kernel for CUDA takes at most "
                f"{MAX_GROUP}: device cpu would do"
            )
        if dtype.itemsize > 2 and kind.head_dim > MAX_FLOAT32_HEAD_DIM:
            name = str(dtype).removeprefix("torch.")
            raise ModelRefused(
                f"{layer.name} has heads of {kind.head_dim} dimensions; the decode kernel for CUDA takes at most "
                f"{MAX_FLOAT32_HEAD_DIM} in {name}: dtype bfloat16 would do, or device cpu"
            )
