"""What each attention layer of a model wants of the kernels: the contract between its examination and its kernels.

Owns the types. Knows nothing of how they were found out, of masks or of pages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

# Head dimensions are padded with zeros to a multiple of this in the pool and in queries, which changes no result.
HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Which positions a query at position p sees; layers of equal visibility share their masks."""

    # p - window < position <= p. None: every position up to p.
    window: int | None = None
    # With a window: so many positions from 0 on are seen as well (StreamingLLM's attention sinks, arXiv 2309.17453).
    leading: int = 0
    # A learned score per query head takes part in the softmax with no value (gpt-oss).
    has_sinks: bool = False

    def __post_init__(self) -> None:
        assert self.leading == 0 or self.window is not None, "without a window every position is seen"

    def within(self, max_length: int) -> "Visibility":
        """The same for sequences of at most `max_length` tokens: a window that never binds is none."""
        if self.window is not None and self.window + self.leading >= max_length:
            return replace(self, window=None, leading=0)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Everything that a compiled kernel depends on; layers of one kind share their kernels."""

    num_heads: int
    num_kv_heads: int
    # Of queries and keys, and of values, as the model has them.
    key_dim: int
    value_dim: int
    # Factor of q k^T.
    scale: float
    # score → softcap * tanh(score / softcap), after scaling.
    softcap: float | None = None
    visibility: Visibility = Visibility()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Dimension of a head in the pool, K and V alike."""
        return -(-max(self.key_dim, self.value_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One module that calls the attention interface, once per forward."""

    # Its name in `model.named_modules()`.
    name: str
    kind: AttentionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """The attention layers in the order of the forward; a layer's index is its place in the KV pool."""

    layers: tuple[AttentionLayer, ...]

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Each kind once, in order of appearance."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers))

    def within(self, max_length: int) -> "LayerMap":
        """The same for sequences of at most `max_length` tokens."""
        return self._seeing(lambda visibility: visibility.within(max_length))

    def bounded(self, window: int, leading: int) -> "LayerMap":
        """Layers that see everything get this window and these leading positions; those that slide stay as they are."""
        return self._seeing(
            lambda own: replace(own, window=window, leading=leading) if own.window is None else own,
        )

    def _seeing(self, change: Callable[[Visibility], Visibility]) -> "LayerMap":
        return LayerMap(
            layers=tuple(
                replace(layer, kind=replace(layer.kind, visibility=change(layer.kind.visibility)))
                for layer in self.layers
            )
        )

    @property
    def reach(self) -> tuple[int, int]:
        """(window, leading): no layer sees further back than `window` positions, its own included, but for the first
        `leading`. (0, 0) where some layer sees the whole past."""
        seen = [layer.kind.visibility for layer in self.layers]
        windows = [visibility.window for visibility in seen if visibility.window is not None]
        if len(windows) < len(seen):
            return 0, 0
        return max(windows), max(visibility.leading for visibility in seen)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes in the pool, K and V of every layer."""
        return sum(2 * layer.kind.num_kv_heads * layer.kind.head_dim for layer in self.layers)
