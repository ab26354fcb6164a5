"""The memory figures of a model, and their estimate from its meta model: bytes of weights, of K and V, and of a step.

Owns the counting, and the memory of a step and of tables for a geometry. Knows nothing of free memory or of the choice
of sizes.
"""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from gpu_worker.attention.kv_cache import tensor_shape
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.views import GPU_DECODE_BLOCK
from gpu_worker.compatibility.check_model import default_length, in_bfloat16, length_limit
from gpu_worker.compatibility.probe import calls_without_masks
from gpu_worker.geometry import Geometry
from gpu_worker.layout.step_layout import MAX_SHAPES, StepShape

# One logit and the temporary values of sampling: 45 bytes counted (every row draws with top-p, penalties and allowed
# tokens), and the sort's workspace.
SAMPLING_BYTES_PER_LOGIT = 64
# A prompt's logprobs: logits, their float32 copy, their logarithms.
PROMPT_BYTES_PER_LOGIT = 12
# The same in a captured graph, which samples without a sort: logits, their float32 copy, two more of that size.
GRAPH_BYTES_PER_LOGIT = 16
# Captured graphs share one pool of at most this size, and there are at most this many.
GRAPH_POOL_BYTES, MAX_GRAPHS = 1 << 30, MAX_SHAPES
# Kept free by default. On a GPU: for kernels, workspaces of libraries, the allocator's slack.
CPU_RESERVE_BYTES, GPU_RESERVE_BYTES = 256 << 20, 1 << 30
# Inductor indexes tensors of up to this number of elements with 32 bits. With 64 bits FlexAttention's decode kernel
# does not compile for CUDA, because it mixes both widths in one expression (torch 2.11 to 2.13).
MAX_TENSOR_ELEMENTS = (1 << 31) - 1
# Tokens of the counted step; its memory is proportional to them.
_NUM_TOKENS = 512
# Copies of queries and outputs for a kernel: padded to its shape, and back.
_ATTENTION_COPIES = 4
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTensors:
    """Tensors of the pool with the same shape, K and V of each layer; each head of one is consecutive memory."""

    count: int
    heads: int
    head_dim: int
    # Bytes of an element.
    itemsize: int
    # Pages that each has in addition to those of the pool.
    extra_pages: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all of them."""
        return self.count * self.heads * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The memory that a model needs on a device, in bytes, known before it is loaded."""

    # In the served dtype; and if another dtype needs less, its name and bytes.
    weights: int
    dtype: str
    smaller_weights: tuple[str, int] | None
    # Activations of one token of a step between embedding and logits.
    activations_per_token: int
    # K and V of all layers, by shape.
    pool: tuple[PoolTensors, ...]
    vocab_size: int
    # The model's own maximum length, and the largest max_length that can be served.
    default_length: int
    length_limit: int

    @property
    def kv_per_token(self) -> int:
        """K and V of a token in all layers."""
        return sum(tensors.bytes_per_token for tensors in self.pool)

    @property
    def learned_sinks_per_token(self) -> int:
        """The same in the additional page for learned sinks."""
        return sum(tensors.extra_pages * tensors.bytes_per_token for tensors in self.pool)

    def step(self, geometry: Geometry) -> int:
        """Bytes of the largest step: activations, logits and sampling of every row, logprobs of prompts."""
        sampled = geometry.max_rows * SAMPLING_BYTES_PER_LOGIT
        prompt = max(0, geometry.logit_rows - geometry.max_rows) * PROMPT_BYTES_PER_LOGIT
        return geometry.token_budget * self.activations_per_token + (sampled + prompt) * self.vocab_size

    def graph(self, *, num_tokens: int, num_rows: int) -> int:
        """Bytes that the captured graph of one shape keeps: activations of its tokens, logits and sampling of its rows.

        It is the peak of the captured step, because a replay uses the addresses of the capture.
        """
        return num_tokens * self.activations_per_token + num_rows * GRAPH_BYTES_PER_LOGIT * self.vocab_size

    def graphs(self, geometry: Geometry, *, on_cpu: bool = False) -> int:
        """Bytes of all captured graphs: the largest one's, because only one runs at a time and they share memory.

        A CPU captures decode steps alone. A shape that needs more than GRAPH_POOL_BYTES is not captured.
        """
        num_tokens = geometry.max_rows if on_cpu else geometry.token_budget
        return min(GRAPH_POOL_BYTES, self.graph(num_tokens=num_tokens, num_rows=geometry.max_rows))

    def captures(self, shape: StepShape) -> bool:
        """Whether the graph of a shape fits GRAPH_POOL_BYTES."""
        return self.graph(num_tokens=shape.tokens, num_rows=shape.samples) <= GRAPH_POOL_BYTES

    def tables(self, geometry: Geometry) -> int:
        """Bytes of page tables on device and host, lists of kernels, tables by page, and token history; all int32.

        On a CPU page lists are as wide as the pool, which is little compared with the pages themselves.
        """
        tiles = geometry.prefill_tokens // geometry.chunk_align
        # Decode kernels of all buckets have twice the lines of the table; on a GPU they list blocks of pages.
        blocks = max(1, geometry.page_size // GPU_DECODE_BLOCK)
        lists = ((2 + 2 * blocks) * (geometry.max_rows + 1) + 2 * tiles) * geometry.pages_per_row
        return 4 * (lists + 2 * geometry.num_pages + geometry.history_places)

    def addressable_pages(self, page_size: int) -> int:
        """The most pages for which no tensor of the pool exceeds MAX_TENSOR_ELEMENTS."""
        return min(
            MAX_TENSOR_ELEMENTS // (tensors.heads * tensors.head_dim * page_size) - tensors.extra_pages
            for tensors in self.pool
        )


def estimate(meta_model: PreTrainedModel, layers: LayerMap, *, dtype: torch.dtype, packs: bool) -> Costs:
    """The memory figures of the model; packs: its linear layers will be packed."""
    halves = sum(parameter.numel() for parameter in meta_model.parameters()) * _HALF_BYTES
    return Costs(
        weights=meta_weight_bytes(meta_model, packs=packs),
        dtype=str(dtype).removeprefix("torch."),
        smaller_weights=("bfloat16", halves) if dtype.itemsize > _HALF_BYTES else None,
        activations_per_token=activation_bytes(meta_model, layers, dtype),
        pool=pool_tensors(layers, dtype),
        vocab_size=int(meta_model.config.get_text_config().vocab_size),
        default_length=default_length(meta_model.config),
        length_limit=length_limit(meta_model.config),
    )


def pool_tensors(layers: LayerMap, dtype: torch.dtype) -> tuple[PoolTensors, ...]:
    shapes = Counter(tensor_shape(layer.kind, num_pages=0, page_size=1) for layer in layers.layers)
    return tuple(
        PoolTensors(count=2 * num, heads=heads, head_dim=head_dim, itemsize=dtype.itemsize, extra_pages=extra)
        for (heads, extra, head_dim), num in shapes.items()
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
    """Bytes of the weights, a tied one counted once; packs: linear layers are packed, a tied one as a copy."""
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
