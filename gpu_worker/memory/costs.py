"""The memory figures of a model: the contract between their estimate and the choice of sizes.

Owns the memory of a step and of tables for a geometry. Knows nothing of how the figures are measured.
"""

from dataclasses import dataclass

from gpu_worker.attention.views import GPU_DECODE_BLOCK
from gpu_worker.geometry import Geometry
from gpu_worker.layout.shapes import MAX_SHAPES, StepShape

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTensor:
    """K, or V, of one layer in the pool: both have the same shape."""

    elements_per_token: int
    # Pages that the tensor has in addition to those of the pool.
    extra_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSlices:
    """Tensors of the pool (K and V count as two) with the same number of heads, each of which is consecutive memory."""

    tensors: int
    heads: int
    # Of one head.
    bytes_per_token: int
    extra_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The memory that a model needs on a device, in bytes, known before it is loaded."""

    # In the served dtype; and if another dtype needs less, its name and bytes.
    weights: int
    dtype: str
    smaller_weights: tuple[str, int] | None
    # Activations of one token of a step between embedding and logits.
    activations_per_token: int
    # K and V of a token in all layers; and of a token in the additional page for learned sinks.
    kv_per_token: int
    learned_sinks_per_token: int
    # The different shapes of K and V among the layers.
    pool_tensors: tuple[PoolTensor, ...]
    vocab_size: int
    # The model's own maximum length, and the largest max_length that can be served.
    default_length: int
    length_limit: int
    # All tensors of the pool, by shape.
    slices: tuple[PoolSlices, ...] = ()

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
            MAX_TENSOR_ELEMENTS // (tensor.elements_per_token * page_size) - tensor.extra_pages
            for tensor in self.pool_tensors
        )
