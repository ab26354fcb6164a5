"""Layers of small heads, whose numbers a test does not care for."""

from gpu_worker.attention.layers import AttentionKind, AttentionLayer, LayerMap

KIND = AttentionKind(num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, scale=1.0)


def layers_of(*kinds: AttentionKind) -> LayerMap:
    """A layer of each kind."""
    names = (f"layers.{i}.self_attn" for i in range(len(kinds)))
    return LayerMap(layers=tuple(AttentionLayer(name=name, kind=kind) for name, kind in zip(names, kinds, strict=True)))
