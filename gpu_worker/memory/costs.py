"""What a model takes on a device, as figures: the contract between their estimate and the choice of sizes.

Owns what follows from the figures for a geometry. Knows nothing of how they were found out.
"""

from dataclasses import dataclass

from gpu_worker.geometry import Geometry

# Of one logit and what sampling makes of it: 45 counted (every row drawing with top-p, penalties and allowed tokens),
# the sort's workspace.
SAMPLING_BYTES_PER_LOGIT = 64
# A prompt's logprobs: logits, their float32 copy, their logarithms.
PROMPT_BYTES_PER_LOGIT = 12
# Inductor indexes tensors of up to this many elements with 32 bits. With 64 bits FlexAttention's decode kernel does
# not compile for CUDA: it mixes both widths in one expression (torch 2.11 to 2.13).
MAX_TENSOR_ELEMENTS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTensor:
    """K, or V, of one layer in the pool: both have the same shape."""

    elements_per_token: int
    # Pages that the tensor has besides those of the pool.
    extra_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a model takes on a device, in bytes, before it is loaded."""

    # As served; and, where another dtype takes less, its name and bytes.
    weights: int
    dtype: str
    smaller_weights: tuple[str, int] | None
    # Of one token of a step: everything between embedding and logits.
    activations_per_token: int
    # K and V of a token, all layers; and of one in the page that a pool has for sinks whatever its pages.
    kv_per_token: int
    learned_sinks_per_token: int
    # The different shapes of K and V among the layers.
    pool_tensors: tuple[PoolTensor, ...]
    vocab_size: int
    # Positions that the model was made for, and those that it can be served with.
    default_length: int
    length_limit: int

    def step(self, geometry: Geometry) -> int:
        """The largest step: activations of the budget, logits and sampling of every row, logprobs of prompts."""
        sampled = geometry.max_rows * SAMPLING_BYTES_PER_LOGIT
        told = max(0, geometry.logit_rows - geometry.max_rows) * PROMPT_BYTES_PER_LOGIT
        return geometry.token_budget * self.activations_per_token + (sampled + told) * self.vocab_size

    def tables(self, geometry: Geometry) -> int:
        """Page tables of rows on device and host, page lists of the kernels, the pages' own, rows' tokens; int32 each.

        On a CPU the tables are as wide as the pool, which is little beside the pages themselves.
        """
        tiles = geometry.prefill_tokens // geometry.chunk_align
        lists = (4 * (geometry.max_rows + 1) + 2 * tiles) * geometry.pages_per_row
        return 4 * (lists + 2 * geometry.num_pages + geometry.history_places)

    def addressable_pages(self, page_size: int) -> int:
        """Pages of a pool in which every tensor has MAX_TENSOR_ELEMENTS at most."""
        return min(
            MAX_TENSOR_ELEMENTS // (tensor.elements_per_token * page_size) - tensor.extra_pages
            for tensor in self.pool_tensors
        )
