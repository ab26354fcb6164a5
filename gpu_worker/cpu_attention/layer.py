"""The arguments of the C++ attention kernels that a layer's kind and the page table determine."""

from torch import Tensor, int32

from gpu_worker.attention.layers import AttentionKind


def layer_arguments(kind: AttentionKind, table: Tensor, page_size: int) -> dict[str, int | float]:
    """The fields that decode and prefill calls have in common; table: int32 [lines, width]."""
    assert table.dtype == int32 and table.stride(1) == 1
    return {
        "table": table.data_ptr(),
        "num_kv_heads": kind.num_kv_heads,
        "group": kind.group,
        "key_dim": kind.key_dim,
        "value_dim": kind.value_dim,
        "head_dim": kind.head_dim,
        "page_size": page_size,
        "window": kind.pattern.window or 0,
        "sink_tokens": kind.pattern.sink_tokens,
        "scale": kind.scale,
        "softcap": kind.softcap or 0,
    }
