"""BlockMasks over the paged pool, which the kernels run with; they are updated in place in each step and never rebuilt.

Owns which physical blocks each query tile reads, and which positions of a block are masked. Knows nothing of rows'
state, tensors of K and V, or models. A "block" is the KV side of a BlockMask's tile: for prefill a page; for decode one
of the blocks_per_page equal parts of a page, numbered through the pool.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gpu_worker.attention.views import DecodeBlocks, PrefillBlocks, View


class DecodeMask:
    """One query position per slot. Every listed block is the slot's own, so positions are masked in at most three
    blocks: the last one, the one in which the window begins, and the one in which the sink tokens end.

    All blocks are partial: with full blocks the GPU's decode kernel spreads each KV split over the whole pool, and a
    row takes few mask evaluations anyway. Slots with no blocks are skipped and yield zeros. Token slots are compared
    without a division, because the CPU kernel would divide for every score.
    """

    def __init__(self, view: View, *, list_width: int, ends: tuple[Tensor, ...]) -> None:
        """list_width: pages. ends: token slots, int32 [slots]: the last visible one, and the end of its block; those
        between are not computed yet. They are kept by reference."""
        slots, device = ends[0].shape[0], ends[0].device
        self.view, self._ends = view, ends
        self.block_lists = torch.zeros(slots, list_width * view.blocks_per_page, dtype=torch.int32, device=device)
        self.num_blocks = torch.zeros(slots, 1, 1, dtype=torch.int32, device=device)
        self.gap_start, self.gap_end, self.sink_gap_start, self.sink_gap_end = (
            torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(4)
        )
        self._nth_block = torch.arange(view.max_decode, device=device)
        self._is_window = (self._nth_block >= view.sink_token_blocks).long()
        self._nth_of_page = torch.arange(view.blocks_per_page, dtype=torch.int32, device=device)
        if view.learned_sink_slot is not None:
            # The block of learned sinks is always listed first.
            self.block_lists[:, 0] = view.learned_sink_slot // view.decode_block

    def block_mask(self, group: int) -> BlockMask:
        """The mask for kernels with `group` query rows, which are the query heads per KV head."""
        last_slot, block_end = self._ends
        gap_start, gap_end, learned_sink_slot = self.gap_start, self.gap_end, self.view.learned_sink_slot
        sink_gap_start, sink_gap_end = self.sink_gap_start, self.sink_gap_end
        has_window, cuts_sink_tokens = self.view.pattern.window is not None, self.view.cuts_block_of_sink_tokens

        def cut(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = (kv_idx <= last_slot[b]) | (kv_idx >= block_end[b])
            if has_window:
                seen = seen & ((kv_idx >= gap_end[b]) | (kv_idx < gap_start[b]))
            if cuts_sink_tokens:
                seen = seen & ((kv_idx >= sink_gap_end[b]) | (kv_idx < sink_gap_start[b]))
            if learned_sink_slot is not None:
                # The page of learned sinks is the pool's last.
                seen = seen & (kv_idx <= learned_sink_slot)
            return seen

        return BlockMask.from_kv_blocks(
            self.num_blocks,
            self.block_lists[:, None, None, :],
            # At least the 16 query rows of a tensor-core tile.
            BLOCK_SIZE=(max(16, 1 << (group - 1).bit_length()), self.view.decode_block),
            mask_mod=cut,
            seq_lengths=(group, self.view.pool_pages * self.view.page_size),
            compute_q_blocks=False,
        )

    def update(self, blocks: DecodeBlocks[Tensor], table: Tensor, slots: Tensor) -> None:
        """Updates the lists for a step.

        table: the page table, int32 [rows' slots, width], with pages in logical order. slots: int64 [slots], the entry
        of the table that each slot lists.
        """
        self.num_blocks.view(-1).copy_(blocks.num_blocks)
        self._list_blocks(blocks, table, slots)
        if blocks.gap_start is not None and blocks.gap_end is not None:
            self.gap_start.copy_(blocks.gap_start)
            self.gap_end.copy_(blocks.gap_end)
        if blocks.sink_gap_start is not None and blocks.sink_gap_end is not None:
            self.sink_gap_start.copy_(blocks.sink_gap_start)
            self.sink_gap_end.copy_(blocks.sink_gap_end)

    def _list_blocks(self, blocks: DecodeBlocks[Tensor], table: Tensor, slots: Tensor) -> None:
        # Sizes do not depend on values, so that a CUDA graph can contain these operations.
        view, begin = self.view, self.view.num_learned_sink_pages
        if view.is_plain and view.blocks_per_page == 1:
            torch.index_select(table, 0, slots, out=self.block_lists)
        elif blocks.skipped is None:
            pages = table if view.is_plain else table[:, : view.pages_per_row]
            pages = pages.index_select(0, slots)
            listed = self.block_lists[:, begin : begin + pages.shape[1] * view.blocks_per_page]
            torch.add(
                self._nth_of_page,
                pages[:, :, None],
                alpha=view.blocks_per_page,
                out=listed.unflatten(1, (pages.shape[1], view.blocks_per_page)),
            )
        else:
            nth = torch.addcmul(self._nth_block, blocks.skipped[:, None], self._is_window)
            nth.clamp_(max=view.blocks_per_row - 1)
            cols = nth if view.blocks_per_page == 1 else nth // view.blocks_per_page
            listed = table[slots[:, None], cols]
            if view.blocks_per_page > 1:
                listed = listed * view.blocks_per_page + nth % view.blocks_per_page
            self.block_lists[:, begin : begin + view.max_decode] = listed


class PrefillMask:
    """Prompt chunks packed along the query axis, each aligned to the query tile."""

    def __init__(self, view: View, *, q_positions: Tensor, logical_of_page: Tensor, list_width: int) -> None:
        """q_positions: int32 [queries], -1 for padding (its results are dropped); logical_of_page: int32 [pages of the
        pool]. Both are kept by reference."""
        num_queries, device = q_positions.shape[0], q_positions.device
        self.view, self.q_positions = view, q_positions
        shape = (1, 1, num_queries // view.q_block, list_width)
        # The GPU's kernel takes the strides of one list for both.
        self.partial_lists, self.full_lists = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        self.num_partial, self.num_full = (torch.zeros(shape[:3], dtype=torch.int32, device=device) for _ in range(2))
        self._nth_page = torch.arange(view.max_full, device=device)
        self._is_window = (self._nth_page >= view.full_sink_token_pages).long()
        page_size, learned_sink_slot = view.page_size, view.learned_sink_slot
        window, sink_tokens = view.pattern.window, view.pattern.sink_tokens

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            position = logical_of_page[kv_idx // page_size] * page_size + kv_idx % page_size
            seen = position <= q_positions[q_idx]
            if window is not None:
                near = position > q_positions[q_idx] - window
                seen = seen & ((near | (position < sink_tokens)) if sink_tokens else near)
            if learned_sink_slot is not None:
                seen = (seen & (kv_idx < learned_sink_slot)) | (kv_idx == learned_sink_slot)
            return seen

        self.block_mask = BlockMask.from_kv_blocks(
            self.num_partial,
            self.partial_lists,
            self.num_full,
            self.full_lists,
            BLOCK_SIZE=(view.q_block, page_size),
            mask_mod=visible,
            seq_lengths=(num_queries, view.pool_pages * page_size),
            compute_q_blocks=False,
        )

    def update(self, blocks: PrefillBlocks[Tensor], table: Tensor, slots: Tensor) -> None:
        """As that of `DecodeMask`; slots: int64 [tiles], the entry of the table that each tile lists."""
        if self.view.is_plain:
            torch.index_select(table, 0, slots, out=self.full_lists[0, 0])
        elif blocks.skipped is None:
            self.full_lists[0, 0, :, : self.view.max_full] = table[:, : self.view.max_full].index_select(0, slots)
        elif self.view.max_full:
            cols = torch.addcmul(self._nth_page, blocks.skipped[:, None], self._is_window)
            cols.clamp_(max=self.view.pages_per_row - 1)
            self.full_lists[0, 0, :, : self.view.max_full] = table[slots[:, None], cols]
        self.num_full[0, 0].copy_(blocks.num_full)
        self.num_partial[0, 0].copy_(blocks.num_partial)
        self.partial_lists[0, 0, :, : blocks.partial_pages.shape[1]] = blocks.partial_pages
