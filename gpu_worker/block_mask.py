"""BlockMasks over the paged pool: the general conversion, and the direct masks that the kernels run with.

Owns which physical pages each query tile reads and where a page is cut. Knows nothing of rows' state, tensors of K
and V, or models. "Block" is a BlockMask tile; its KV side is always one page.

The conversion turns any logical mask (over positions of each sequence) into a physical one (over the pool) and is
the oracle for the direct masks, which are updated in place each step and never rebuilt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def logical_to_physical(logical: BlockMask, page_table: Tensor, num_pages: int) -> BlockMask:
    """The mask over the pool that shows each query what `logical` shows it over its own sequence's positions.

    logical: [B, H, Q, KV], KV tile = page. page_table: int [B, >= KV tiles], the page of each logical tile, -1 where
    there is none; a sequence's pages are distinct. Listed tiles must have a page.
    Method: PyTorch's attention-gym, `PagedAttention.convert_logical_block_mask`.
    """
    batch, heads, num_q_blocks, _ = logical.kv_indices.shape
    page_size = logical.BLOCK_SIZE[1]
    page_table = page_table.to(torch.int64)
    num_logical = page_table.shape[1]
    logical_of_page = torch.full((batch, num_pages + 1), -1, dtype=torch.int64, device=page_table.device)
    cols = torch.arange(num_logical, device=page_table.device).expand(batch, num_logical)
    # Tiles without a page write past the pool's end, which is cut off.
    logical_of_page.scatter_(1, torch.where(page_table < 0, num_pages, page_table), cols)
    logical_of_page = logical_of_page[:, :num_pages].contiguous()

    def translate(indices: Tensor) -> Tensor:
        table = page_table[:, None, None, :].expand(batch, heads, num_q_blocks, num_logical)
        listed = table.gather(3, indices.to(torch.int64).clamp(max=num_logical - 1)).clamp(min=0)
        physical = torch.zeros(batch, heads, num_q_blocks, num_pages, dtype=torch.int32, device=listed.device)
        width = min(num_pages, listed.shape[3])
        physical[..., :width] = listed[..., :width]
        return physical

    logical_mod = logical.mask_mod

    def physical_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = logical_of_page[b, kv_idx // page_size]
        position = block.clamp(min=0) * page_size + kv_idx % page_size
        return (block >= 0) & logical_mod(b, h, q_idx, position)

    has_full = logical.full_kv_indices is not None
    return BlockMask.from_kv_blocks(
        logical.kv_num_blocks,
        translate(logical.kv_indices),
        logical.full_kv_num_blocks,
        translate(logical.full_kv_indices) if has_full else None,
        BLOCK_SIZE=logical.BLOCK_SIZE,
        mask_mod=physical_mod,
        seq_lengths=(logical.seq_lengths[0], num_pages * page_size),
        compute_q_blocks=False,
    )


class DecodeMask:
    """One query position per slot: every listed page is the slot's own, so only its last page is cut.

    All pages are partial: with full blocks the GPU's decode kernel spreads each KV split over the whole pool, and a
    row takes few mask evaluations anyway. Slots with no pages are skipped and yield zeros.
    """

    def __init__(self, *, page_lists: Tensor, num_pages: int, page_size: int, group: int, q_block: int) -> None:
        """page_lists: int32 [slots, width], kept by reference. group: query heads per KV head, the query rows."""
        slots, device = page_lists.shape[0], page_lists.device
        self.page_lists = page_lists
        self.num_blocks = torch.zeros(slots, 1, 1, dtype=torch.int32, device=device)
        # Token slots: the last that is seen, and the end of its page; what lies between is not computed yet. Compared
        # without a division, which the CPU kernel would do for every score.
        self.last_slot = torch.zeros(slots, dtype=torch.int32, device=device)
        self.page_end = torch.zeros(slots, dtype=torch.int32, device=device)
        last_slot, page_end = self.last_slot, self.page_end

        def cut_last_page(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx <= last_slot[b]) | (kv_idx >= page_end[b])

        self.block_mask = BlockMask.from_kv_blocks(
            self.num_blocks,
            page_lists[:, None, None, :],
            BLOCK_SIZE=(q_block, page_size),
            mask_mod=cut_last_page,
            seq_lengths=(group, num_pages * page_size),
            compute_q_blocks=False,
        )

    def update(self, num_blocks: Tensor, last_slot: Tensor, page_end: Tensor) -> None:
        """All int64 [slots]: pages each slot reads (0: none), the last token slot seen, the end of that slot's page."""
        self.num_blocks.view(-1).copy_(num_blocks)
        self.last_slot.copy_(last_slot)
        self.page_end.copy_(page_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBlocks:
    """What a step's prefill tiles read; nq query tiles of q_block positions."""

    # int64 [nq]: slot whose page list the tile reads.
    slots: Tensor
    # int64 [nq]: leading pages that every query of the tile sees whole.
    num_full: Tensor
    # int64 [nq] and [nq, w]: pages after those, each cut by position.
    num_partial: Tensor
    partial_pages: Tensor
    # int64 [nq * q_block]: position of each query; -1 is padding and sees nothing.
    q_positions: Tensor


class PrefillMask:
    """Prompt chunks packed along the query axis, each aligned to the query tile."""

    def __init__(
        self,
        *,
        num_queries: int,
        q_block: int,
        table_width: int,
        logical_of_page: Tensor,
        num_pages: int,
        page_size: int,
    ) -> None:
        """logical_of_page: int32 [num_pages], kept by reference."""
        num_q_blocks, device = num_queries // q_block, logical_of_page.device
        self.q_block = q_block
        # Pages from the first that a tile's first query does not see whole to the one of its last query, at most.
        self.max_partial = min((page_size + q_block - 3) // page_size + 1, table_width)
        lists = torch.zeros(2, 1, 1, num_q_blocks, table_width, dtype=torch.int32, device=device)
        self.partial_lists, self.full_lists = lists[0].clone(), lists[1].clone()
        counts = torch.zeros(2, 1, 1, num_q_blocks, dtype=torch.int32, device=device)
        self.num_partial, self.num_full = counts[0].clone(), counts[1].clone()
        self.q_positions = torch.full((num_queries,), -1, dtype=torch.int32, device=device)
        q_positions = self.q_positions

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            position = logical_of_page[kv_idx // page_size] * page_size + kv_idx % page_size
            return position <= q_positions[q_idx]

        self.block_mask = BlockMask.from_kv_blocks(
            self.num_partial,
            self.partial_lists,
            self.num_full,
            self.full_lists,
            BLOCK_SIZE=(q_block, page_size),
            mask_mod=causal,
            seq_lengths=(num_queries, num_pages * page_size),
            compute_q_blocks=False,
        )

    def update(self, blocks: PrefillBlocks, page_lists: Tensor) -> None:
        """page_lists: int32 [slots, width], in logical order, as it stands in this step."""
        torch.index_select(page_lists, 0, blocks.slots, out=self.full_lists[0, 0])
        self.num_full[0, 0].copy_(blocks.num_full)
        self.num_partial[0, 0].copy_(blocks.num_partial)
        self.partial_lists[0, 0, :, : blocks.partial_pages.shape[1]] = blocks.partial_pages
        self.q_positions.copy_(blocks.q_positions)
