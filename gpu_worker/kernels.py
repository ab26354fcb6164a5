"""The attention kernels of one worker, one per static shape, and the context that a step hands to every layer.

Owns which kernel a step runs with and the update of its masks. Knows nothing of plans, models or sampling.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.attention import DecodeAttention, PrefillAttention, StepContext
from gpu_worker.block_mask import DecodeMask, PrefillBlocks, PrefillMask
from gpu_worker.geometry import Geometry
from gpu_worker.kv_cache import KvCache
from gpu_worker.shapes import Shapes
from gpu_worker.slots import DeviceTables
from gpu_worker.step import StepLayout


class Kernels:
    """Every kernel that steps of this geometry may need; each compiles at its first call."""

    def __init__(
        self,
        geometry: Geometry,
        shapes: Shapes,
        cache: KvCache,
        tables: DeviceTables,
        *,
        num_heads: int,
        scale: float,
    ) -> None:
        self._geometry, self._shapes, self._cache, self._tables = geometry, shapes, cache, tables
        num_kv_heads, _, head_dim = cache.keys[0].shape
        group, dtype = num_heads // num_kv_heads, cache.keys[0].dtype
        self.decode = {
            bucket: DecodeAttention(
                self._decode_mask(bucket, group),
                num_kv_heads=num_kv_heads,
                group=group,
                head_dim=head_dim,
                scale=scale,
                dtype=dtype,
            )
            for bucket in shapes.decode_buckets
        }
        self.prefill = {
            bucket: PrefillAttention(
                self._prefill_mask(bucket),
                page_size=geometry.page_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=scale,
                dtype=dtype,
            )
            for bucket in shapes.prefill_buckets
        }

    @property
    def max_partial(self) -> int:
        """Pages that a query tile may see in part, at most."""
        return self.prefill[self._shapes.prefill_buckets[-1]].mask.max_partial

    def _decode_mask(self, bucket: int, group: int) -> DecodeMask:
        lists = self._tables.pages
        if self._shapes.token_multiple is not None:
            lists = torch.zeros(bucket, lists.shape[1], dtype=torch.int32, device=lists.device)
        return DecodeMask(
            page_lists=lists,
            num_pages=self._geometry.num_pages,
            page_size=self._geometry.page_size,
            group=group,
            # At least the 16 query rows of a tensor-core tile.
            q_block=max(16, 1 << (group - 1).bit_length()),
        )

    def _prefill_mask(self, bucket: int) -> PrefillMask:
        return PrefillMask(
            num_queries=bucket,
            q_block=self._geometry.chunk_align,
            table_width=self._tables.pages.shape[1],
            logical_of_page=self._tables.logical_of_page,
            num_pages=self._geometry.num_pages,
            page_size=self._geometry.page_size,
        )

    def context(self, layout: StepLayout, staged: Mapping[str, Tensor]) -> StepContext:
        """Updates the masks for `layout`, whose arrays `staged` holds on the device; table edits are done."""
        none = staged["kv_slots"][:0]
        decode = prefill = None
        pages = self._tables.pages
        if layout.decode is not None:
            decode = self.decode[layout.decode.bucket]
            if layout.decode.list_slots is not None:
                torch.index_select(pages, 0, staged["decode_list_slots"], out=decode.mask.page_lists)
            decode.mask.update(staged["decode_num_blocks"], staged["decode_last_slot"], staged["decode_page_end"])
        if layout.prefill is not None:
            prefill = self.prefill[layout.prefill.bucket]
            blocks = PrefillBlocks(
                slots=staged["prefill_slots"],
                num_full=staged["prefill_num_full"],
                num_partial=staged["prefill_num_partial"],
                partial_pages=staged["prefill_partial_pages"],
                q_positions=staged["prefill_q_positions"],
            )
            prefill.mask.update(blocks, pages)
        return StepContext(
            cache=self._cache,
            kv_slots=staged["kv_slots"],
            decode=decode,
            decode_slots=staged["decode_slots"] if decode else none,
            prefill=prefill,
            prefill_places=staged["prefill_places"] if prefill else none,
        )
