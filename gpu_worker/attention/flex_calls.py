"""How queries are placed in the calls of FlexAttention's kernels, and outputs taken from them.

Knows nothing of plans or rows.

Shape legend: T packed tokens, H query heads, K KV heads, G query heads per KV head, D head dimension in the pool, B
decode slots, P prefill queries, N the pool's token slots.
"""

import torch
from torch import Tensor

from gpu_worker.attention.block_mask import DecodeMask, PrefillMask
from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.attention.kernel_options import Call, Card, decode_options, prefill_options
from gpu_worker.attention.layers import AttentionKind


class DecodeAttention:
    """One query position per slot. The query heads of a group are query rows of its KV head: [B, K, G, D]."""

    def __init__(self, kind: AttentionKind, mask: DecodeMask, *, dtype: torch.dtype) -> None:
        slots, device = mask.block_lists.shape[0], mask.block_lists.device
        self.kind, self.mask = kind, mask
        self.query = torch.zeros(slots, kind.num_kv_heads, kind.group, kind.head_dim, dtype=dtype, device=device)
        self._written = self.query[..., : kind.key_dim]
        blocks = mask.block_mask(kind.group)
        self.kernel = FlexKernel(
            kind,
            blocks,
            learned_sink_slot=mask.view.learned_sink_slot,
            rows_are_heads=True,
            options=decode_options(Card.of(device), Call.of(kind, blocks, bucket=slots, dtype=dtype)),
        )

    def __call__(
        self, query_THD: Tensor, places: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Output [B, H, value dimension] of queries [B, H, key dimension], one for each slot in order; key and value
        [K, N, D]; sinks [H]. places: None, because every slot has a query."""
        grouped = query_THD.shape[0], *self.query.shape[1:3], self.kind.key_dim
        query = self.query
        if self.kind.key_dim < self.kind.head_dim:
            self._written.copy_(query_THD.view(grouped))
        else:
            # The kernel reads the model's own queries. It is compiled for one set of strides, and sizes of 1 may have
            # any.
            query = query_THD.contiguous().as_strided(self.query.shape, self.query.stride())
        if sinks is not None:
            sinks = sinks.view(self.query.shape[1:3])
        out = self.kernel(query, key.unsqueeze(0), value.unsqueeze(0), sinks)
        return out.flatten(1, 2)[..., : self.kind.value_dim]


class PrefillAttention:
    """Prompt chunks, packed along the query axis: [1, H, P, D]."""

    def __init__(self, kind: AttentionKind, mask: PrefillMask, *, dtype: torch.dtype) -> None:
        num_queries, device = mask.q_positions.shape[0], mask.q_positions.device
        self.kind, self.mask = kind, mask
        self.query = torch.zeros(num_queries, kind.num_heads, kind.head_dim, dtype=dtype, device=device)
        self._written = self.query[..., : kind.key_dim]
        self.kernel = FlexKernel(
            kind,
            mask.block_mask,
            learned_sink_slot=mask.view.learned_sink_slot,
            rows_are_heads=False,
            options=prefill_options(Card.of(device), Call.of(kind, mask.block_mask, bucket=num_queries, dtype=dtype)),
        )

    def __call__(
        self, query_THD: Tensor, places: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Output [P, H, value dimension] of queries [T, H, key dimension] at `places` int64 [T] along P; key and value
        [K, N, D]; sinks [H]."""
        self._written[places] = query_THD
        query = self.query.transpose(0, 1).unsqueeze(0)
        out = self.kernel(query, key.unsqueeze(0), value.unsqueeze(0), sinks)
        return out.squeeze(0).transpose(0, 1)[..., : self.kind.value_dim]
