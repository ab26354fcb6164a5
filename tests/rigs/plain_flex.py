"""FlexAttention by plain operators of torch, for tests of what is around its kernels: nothing is compiled.

A query sees the positions of its tile's listed blocks: all of those in full blocks, in partial blocks those that the
mask function allows. As in the compiled kernels, nothing of other blocks is read, and a query that sees nothing is 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.attention.layers import AttentionKind


@contextmanager
def plain_flex() -> Iterator[None]:
    """FlexAttention's kernels that are made inside are plain, also afterwards."""
    with patch.object(FlexKernel, "__init__", _make_plain):
        yield


def _make_plain(
    kernel: FlexKernel,
    kind: AttentionKind,
    mask: BlockMask,
    *,
    learned_sink_slot: int | None,
    rows_are_heads: bool,
    options: Any,
) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        group = 1 if rows_are_heads else kind.group
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for batch, queries, slots, seen in _seen(mask, query.shape[0]):
            keys, values = (each[0, :, slots].repeat_interleave(group, 0).float() for each in (key, value))
            scores = query[batch, :, queries].float() @ keys.mT * kind.scale
            if kind.softcap is not None:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            if learned_sink_slot is not None:
                assert sinks is not None
                of_queries = sinks if rows_are_heads else sinks[:, None]
                scores[..., slots == learned_sink_slot] = of_queries[..., None].float()
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
            # 0 x NaN is NaN, and what a query does not see may be NaN.
            is_bad = ~values.isfinite()
            own = weights @ values.masked_fill(is_bad, 0.0)
            out[batch, :, queries] = own.masked_fill(seen.float() @ is_bad.float() > 0, torch.nan).to(out.dtype)
        return out

    kernel._num_threads = torch.get_num_threads()
    kernel._compiled = call


def _seen(mask: BlockMask, num_batches: int) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """For each tile that has blocks: its batch, queries, the token slots of its blocks [S], and bool [queries, S]."""
    q_block, kv_block = mask.BLOCK_SIZE
    num_queries, in_block, head = mask.seq_lengths[0], torch.arange(kv_block), torch.zeros((), dtype=torch.int64)
    for batch in range(num_batches):
        for tile in range(-(-num_queries // q_block)):
            place = (batch if len(mask.kv_num_blocks) > 1 else 0, 0, tile)
            blocks = mask.kv_indices[place][: mask.kv_num_blocks[place]]
            num_partial = len(blocks) * kv_block
            if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
                blocks = torch.cat([blocks, mask.full_kv_indices[place][: mask.full_kv_num_blocks[place]]])
            slots = (blocks[:, None] * kv_block + in_block).flatten().long()
            if not slots.numel():
                continue
            queries = torch.arange(tile * q_block, min((tile + 1) * q_block, num_queries))
            allowed = mask.mask_mod(torch.tensor(batch), head, queries[:, None], slots)
            seen = allowed.expand(len(queries), -1).clone()
            seen[:, num_partial:] = True
            yield batch, slice(tile * q_block, (tile + 1) * q_block), slots, seen
