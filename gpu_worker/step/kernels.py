"""The attention kernels of one worker, one per kind and static shape, and the context that a step hands to every layer.

Owns which kernel a layer runs a step with and the update of the masks, which layers of equal visibility share. Knows
nothing of plans, models or sampling.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.attention.block_mask import DecodeBlocks, DecodeEnds, DecodeMask, PrefillBlocks, PrefillMask
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import DecodeAttention, PrefillAttention, StepContext
from gpu_worker.attention.views import View
from gpu_worker.geometry import Geometry
from gpu_worker.step.layout import StepLayout
from gpu_worker.step.row_tables import DeviceTables
from gpu_worker.step.shapes import Shapes


class Kernels:
    """Every kernel that steps of this geometry may need; each compiles at its first call."""

    def __init__(
        self, layers: LayerMap, geometry: Geometry, shapes: Shapes, cache: KvCache, tables: DeviceTables
    ) -> None:
        self._geometry, self._shapes, self._cache, self._tables = geometry, shapes, cache, tables
        visibilities = dict.fromkeys(kind.visibility for kind in layers.kinds)
        # In the order of a layout's views.
        self.views = tuple(View.of(visibility, geometry) for visibility in visibilities)
        device, dtype = tables.pages.device, cache.keys[0].dtype
        self._ends = {bucket: DecodeEnds(bucket, device) for bucket in shapes.decode_buckets}
        self._q_positions = {
            bucket: torch.full((bucket,), -1, dtype=torch.int32, device=device) for bucket in shapes.prefill_buckets
        }
        self.decode_masks = {
            bucket: tuple(
                DecodeMask(view, page_lists=self._decode_lists(view, bucket), ends=self._ends[bucket])
                for view in self.views
            )
            for bucket in shapes.decode_buckets
        }
        self.prefill_masks = {
            bucket: tuple(
                PrefillMask(
                    view,
                    q_positions=self._q_positions[bucket],
                    logical_of_page=tables.logical_of_page,
                    list_width=self._list_width(view),
                )
                for view in self.views
            )
            for bucket in shapes.prefill_buckets
        }
        place = {visibility: i for i, visibility in enumerate(visibilities)}
        # By layer; layers of one kind share one.
        self.decode: dict[int, tuple[DecodeAttention, ...]] = {}
        for bucket, masks in self.decode_masks.items():
            of_kind = {kind: DecodeAttention(kind, masks[place[kind.visibility]], dtype=dtype) for kind in layers.kinds}
            self.decode[bucket] = tuple(of_kind[layer.kind] for layer in layers.layers)
        self.prefill: dict[int, tuple[PrefillAttention, ...]] = {}
        for bucket, tile_masks in self.prefill_masks.items():
            kernels = {
                kind: PrefillAttention(kind, tile_masks[place[kind.visibility]], dtype=dtype) for kind in layers.kinds
            }
            self.prefill[bucket] = tuple(kernels[layer.kind] for layer in layers.layers)

    def _decode_lists(self, view: View, bucket: int) -> Tensor:
        """int32 [slots, width]; the page table itself where that is what the slots list."""
        table = self._tables.pages
        if self._shapes.token_multiple is None and view.is_plain:
            return table
        return torch.zeros(bucket, self._list_width(view), dtype=torch.int32, device=table.device)

    def _list_width(self, view: View) -> int:
        """As wide as the pool on a CPU, whose kernel insists, else as what a row may have; few may be in use."""
        if self._tables.pages.is_cpu:
            return view.pool_pages
        return self._tables.pages.shape[1] + view.num_sink_pages

    def context(self, layout: StepLayout, staged: Mapping[str, Tensor]) -> StepContext:
        """Updates the masks for `layout`, whose arrays `staged` holds on the device; table edits are done."""
        none = staged["kv_slots"][:0]
        decode = prefill = None
        if layout.decode is not None:
            bucket = layout.decode.bucket
            decode = self.decode[bucket]
            self._ends[bucket].update(staged["decode_last_slot"], staged["decode_page_end"])
            for i, mask in enumerate(self.decode_masks[bucket]):
                blocks = DecodeBlocks(
                    num_blocks=staged[f"decode_{i}_num_blocks"],
                    skipped=staged.get(f"decode_{i}_skipped"),
                    gap_start=staged.get(f"decode_{i}_gap_start"),
                    gap_end=staged.get(f"decode_{i}_gap_end"),
                    leading_gap_start=staged.get(f"decode_{i}_leading_gap_start"),
                    leading_gap_end=staged.get(f"decode_{i}_leading_gap_end"),
                )
                mask.update(blocks, self._tables.pages, staged.get("decode_list_slots"))
        if layout.prefill is not None:
            bucket = layout.prefill.bucket
            prefill = self.prefill[bucket]
            self._q_positions[bucket].copy_(staged["prefill_q_positions"])
            for i, tile_mask in enumerate(self.prefill_masks[bucket]):
                tile_blocks = PrefillBlocks(
                    slots=staged["prefill_slots"],
                    num_full=staged[f"prefill_{i}_num_full"],
                    skipped=staged.get(f"prefill_{i}_skipped"),
                    num_partial=staged[f"prefill_{i}_num_partial"],
                    partial_pages=staged[f"prefill_{i}_partial_pages"],
                )
                tile_mask.update(tile_blocks, self._tables.pages)
        return StepContext(
            cache=self._cache,
            kv_slots=staged["kv_slots"],
            decode=decode,
            decode_slots=staged["decode_slots"] if decode else none,
            prefill=prefill,
            prefill_places=staged["prefill_places"] if prefill else none,
        )
