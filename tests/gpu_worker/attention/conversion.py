"""Turns any logical mask, over positions of each sequence, into a physical one, over the pool.

The conversion is the reference for the masks of `gpu_worker.attention.block_mask`.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def logical_to_physical(logical: BlockMask, page_table: Tensor, num_pages: int) -> BlockMask:
    """The mask over the pool in which each query sees the positions of its sequence that it sees in `logical`.

    logical: [B, H, Q, KV], KV tile = page. page_table: int [B, >= KV tiles], the page of each logical tile, -1 for
    tiles without a page; a sequence's pages are distinct. Listed tiles must have a page.
    Method: PyTorch's attention-gym, `PagedAttention.convert_logical_block_mask`.
    """
    batch, heads, num_q_blocks, _ = logical.kv_indices.shape
    page_size = logical.BLOCK_SIZE[1]
    page_table = page_table.to(torch.int64)
    num_logical = page_table.shape[1]
    logical_of_page = torch.full((batch, num_pages + 1), -1, dtype=torch.int64, device=page_table.device)
    cols = torch.arange(num_logical, device=page_table.device).expand(batch, num_logical)
    # Tiles without a page write to an extra column, which is dropped.
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
