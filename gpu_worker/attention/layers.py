"""The parameters of each attention layer of a model: the contract between the compatibility check and the kernels.

Owns the types. Knows nothing of how a model is checked, of masks or of pages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

Kernel = TypeVar("Kernel")
# Head dimensions are padded with zeros to a multiple of this in the pool and in queries, which changes no result.
HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPattern:
    """The positions that a query at position p sees; layers with equal patterns share their masks."""

    # p - window < position <= p. None: every position up to p.
    window: int | None = None
    # With a window: positions 0 to sink_tokens - 1 are seen too (StreamingLLM's attention sinks, arXiv 2309.17453).
    sink_tokens: int = 0
    # A learned score per query head takes part in the softmax without a value (gpt-oss).
    has_learned_sinks: bool = False

    def __post_init__(self) -> None:
        assert self.sink_tokens == 0 or self.window is not None, "without a window every position is seen"

    def within(self, max_length: int) -> "AttentionPattern":
        """The pattern for sequences of at most `max_length` tokens: a window that hides nothing is dropped."""
        if self.window is not None and self.window + self.sink_tokens >= max_length:
            return replace(self, window=None, sink_tokens=0)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The parameters that a compiled kernel depends on; layers of one kind share their kernels."""

    num_heads: int
    num_kv_heads: int
    # Dimension of queries and keys, and of values, as the model has them.
    key_dim: int
    value_dim: int
    # Factor of q k^T.
    scale: float
    # score → softcap * tanh(score / softcap), after scaling.
    softcap: float | None = None
    pattern: AttentionPattern = AttentionPattern()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Dimension of a head in the pool, the same for K and V."""
        return -(-max(self.key_dim, self.value_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One module that calls the attention interface, once per forward."""

    # Its name in `model.named_modules()`.
    name: str
    kind: AttentionKind
    # The first KV head that this process keeps, if the model computes more than those; None if it computes no others.
    first_kv_head: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """The attention layers in the order of the forward; a layer's index is its place in the KV pool."""

    layers: tuple[AttentionLayer, ...]

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Each kind once, in order of appearance."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers))

    def by_layer(self, kernel_of: Callable[[AttentionKind], Kernel]) -> tuple[Kernel, ...]:
        """Returns for each layer what `kernel_of` makes for its kind; layers of one kind share it."""
        made = {kind: kernel_of(kind) for kind in self.kinds}
        return tuple(made[layer.kind] for layer in self.layers)

    def within(self, max_length: int) -> "LayerMap":
        return self._seeing(lambda pattern: pattern.within(max_length))

    def bounded(self, window: int, sink_tokens: int) -> "LayerMap":
        """The layers with this window and these sink tokens; layers that have their own window stay unchanged."""
        return self._seeing(
            lambda mask: replace(mask, window=window, sink_tokens=sink_tokens) if mask.window is None else mask,
        )

    def _seeing(self, change: Callable[[AttentionPattern], AttentionPattern]) -> "LayerMap":
        return LayerMap(
            layers=tuple(
                replace(layer, kind=replace(layer.kind, pattern=change(layer.kind.pattern))) for layer in self.layers
            )
        )

    @property
    def reach(self) -> tuple[int, int]:
        """(window, sink_tokens): no layer sees more than the last `window` positions and the first `sink_tokens` ones.

        Is (0, 0) if some layer sees the whole past.
        """
        seen = [layer.kind.pattern for layer in self.layers]
        windows = [pattern.window for pattern in seen if pattern.window is not None]
        if len(windows) < len(seen):
            return 0, 0
        return max(windows), max(pattern.sink_tokens for pattern in seen)
