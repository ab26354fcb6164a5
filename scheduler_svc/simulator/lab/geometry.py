"""The shape of a model as far as its K/V and its arithmetic go. Owns the named shapes; knows nothing of weights.

The shapes are those of the models' published `config.json`. All have gated MLPs: three matrices per layer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes in elements; `element_bytes` is what one number takes, in the weights and in the K/V."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    element_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """K/V of one token: a key and a value per layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def layer_weights(self) -> int:
        """Elements in the matrices of all layers: query, key, value, output, and the three of the MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Elements in the matrix that makes logits."""
        return self.hidden * self.vocab


def _named(name: str, *sizes: int) -> Geometry:
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = sizes
    return Geometry(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=intermediate, vocab=vocab,
    )  # fmt: skip


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        _named("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        _named("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        _named("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        _named("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
        _named("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936),
        _named("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936),
        _named("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
    )
}
DEFAULT_GEOMETRY = "llama-3.1-8b"
