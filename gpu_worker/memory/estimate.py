"""Estimates a model's memory from its meta model: bytes of weights, of K and V, and of a step's activations.

Owns the counting. Knows nothing of free memory or of the choice of sizes.
"""

import math
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from gpu_worker.attention.kv_cache import pool_bytes, tensor_shape
from gpu_worker.attention.layers import LayerMap
from gpu_worker.compatibility.check_model import default_length, in_bfloat16, length_limit
from gpu_worker.compatibility.probe import calls_without_masks
from gpu_worker.memory.costs import Costs, PoolSlices, PoolTensor

# Tokens of the counted step; its memory is proportional to them.
_NUM_TOKENS = 512
# Copies of queries and outputs for a kernel: padded to its shape, and back.
_ATTENTION_COPIES = 4
_HALF_BYTES = 2


def estimate(meta_model: PreTrainedModel, layers: LayerMap, *, dtype: torch.dtype, packs: bool) -> Costs:
    """The memory figures of the model; packs: its linear layers will be packed."""
    halves = sum(parameter.numel() for parameter in meta_model.parameters()) * _HALF_BYTES
    return Costs(
        weights=meta_weight_bytes(meta_model, packs=packs),
        dtype=str(dtype).removeprefix("torch."),
        smaller_weights=("bfloat16", halves) if dtype.itemsize > _HALF_BYTES else None,
        activations_per_token=activation_bytes(meta_model, layers, dtype),
        kv_per_token=layers.elements_per_token * dtype.itemsize,
        learned_sinks_per_token=pool_bytes(layers, num_pages=0, page_size=1, dtype=dtype),
        pool_tensors=pool_tensors(layers),
        vocab_size=int(meta_model.config.get_text_config().vocab_size),
        default_length=default_length(meta_model.config),
        length_limit=length_limit(meta_model.config),
        slices=pool_slices(layers, dtype),
    )


def pool_tensors(layers: LayerMap) -> tuple[PoolTensor, ...]:
    """The different shapes of the pool's tensors."""
    shapes: dict[PoolTensor, None] = {}
    for kind in layers.kinds:
        extra_tokens = tensor_shape(kind, num_pages=0, page_size=1)[1]
        elements = math.prod(tensor_shape(kind, num_pages=1 - extra_tokens, page_size=1))
        shapes[PoolTensor(elements_per_token=elements, extra_pages=extra_tokens)] = None
    return tuple(shapes)


def pool_slices(layers: LayerMap, dtype: torch.dtype) -> tuple[PoolSlices, ...]:
    """All tensors of the pool, by shape."""
    kinds = Counter(layer.kind for layer in layers.layers)
    shapes = [(2 * count, tensor_shape(kind, num_pages=0, page_size=1)) for kind, count in kinds.items()]
    return tuple(
        PoolSlices(tensors=count, heads=heads, bytes_per_token=head_dim * dtype.itemsize, extra_pages=extra)
        for count, (heads, extra, head_dim) in shapes
    )


def activation_bytes(meta_model: PreTrainedModel, layers: LayerMap, dtype: torch.dtype) -> int:
    """Bytes per token at the peak of a step, logits not counted."""
    # Grouped experts run on the meta device in bfloat16 alone.
    with in_bfloat16(meta_model), LiveBytes() as counted:
        calls_without_masks(meta_model, _NUM_TOKENS)
    peak = counted.peak * dtype.itemsize // torch.bfloat16.itemsize
    around = max(kind.num_heads * kind.head_dim for kind in layers.kinds) * dtype.itemsize * _ATTENTION_COPIES
    return peak // _NUM_TOKENS + around


def meta_weight_bytes(meta_model: nn.Module, *, packs: bool) -> int:
    """Bytes of the model's weights, a tied one counted once.

    packs: linear layers are packed, and a tied one is packed as a copy.
    """
    total = sum(parameter.nbytes for parameter in meta_model.parameters())
    if not packs:
        return total
    linear = {id(module.weight): module.weight for module in meta_model.modules() if type(module) is nn.Linear}
    others = {id(module.weight) for module in meta_model.modules() if isinstance(module, nn.Embedding)}
    return total + sum(linear[tied].nbytes for tied in linear.keys() & others)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors created within, without operators' workspaces; on any device, meta included."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, weakref.finalize[..., Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._known:
                self.live += size
                self.peak = max(self.peak, self.live)
                self._known[key] = weakref.finalize(storage, self._forget, key, size)
        return result

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size
