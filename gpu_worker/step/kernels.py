"""The attention kernels of one worker, one for each kind of layer and static shape.

`Kernels` chooses the kernel of each layer and updates the masks. Layers with equal attention patterns share masks.
"""

import torch
from torch import Tensor

from gpu_worker.attention.block_mask import DecodeEnds, DecodeMask, PrefillMask
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.operator import StepContext
from gpu_worker.attention.paged import DecodeAttention, PrefillAttention
from gpu_worker.attention.views import GPU_DECODE_BLOCK, View
from gpu_worker.geometry import Geometry
from gpu_worker.layout.shapes import Shapes
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.step.device_tables import DeviceTables


class Kernels:
    """Every kernel that steps of this geometry may need; each compiles at its first call."""

    def __init__(
        self, layers: LayerMap, geometry: Geometry, shapes: Shapes, cache: KvCache, tables: DeviceTables
    ) -> None:
        self._geometry, self._shapes, self._tables = geometry, shapes, tables
        patterns = dict.fromkeys(kind.pattern for kind in layers.kinds)
        # In the order of `DecodePart.blocks` and `PrefillPart.blocks`.
        decode_block = GPU_DECODE_BLOCK if shapes.is_padded else None
        self.views = tuple(View.of(pattern, geometry, decode_block=decode_block) for pattern in patterns)
        device, dtype = tables.pages.device, cache.keys[0].dtype
        self._ends = {bucket: DecodeEnds(bucket, device) for bucket in shapes.decode_buckets}
        self._q_positions = {
            bucket: torch.full((bucket,), -1, dtype=torch.int32, device=device) for bucket in shapes.prefill_buckets
        }
        self.decode_masks = {
            bucket: tuple(
                DecodeMask(view, block_lists=self._decode_lists(view, bucket), ends=self._ends[bucket])
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
        nth = {pattern: i for i, pattern in enumerate(patterns)}
        # For each bucket, the kernel of each layer. Layers of one kind share a kernel.
        self.decode: dict[int, tuple[DecodeAttention, ...]] = {}
        for bucket, masks in self.decode_masks.items():
            decode = {kind: DecodeAttention(kind, masks[nth[kind.pattern]], dtype=dtype) for kind in layers.kinds}
            self.decode[bucket] = tuple(decode[layer.kind] for layer in layers.layers)
        self.prefill: dict[int, tuple[PrefillAttention, ...]] = {}
        for bucket, tile_masks in self.prefill_masks.items():
            prefill = {
                kind: PrefillAttention(kind, tile_masks[nth[kind.pattern]], dtype=dtype) for kind in layers.kinds
            }
            self.prefill[bucket] = tuple(prefill[layer.kind] for layer in layers.layers)

    def _decode_lists(self, view: View, bucket: int) -> Tensor:
        """Returns int32 [slots, width]; the page table itself if every slot lists all pages of its row, whole."""
        table = self._tables.pages
        if not self._shapes.is_padded and view.is_plain:
            return table
        width = self._list_width(view) * view.blocks_per_page
        return torch.zeros(bucket, width, dtype=torch.int32, device=table.device)

    def _list_width(self, view: View) -> int:
        """Returns the pages of a list. The CPU kernel requires the pool's pages, others only those of a row."""
        if self._tables.pages.is_cpu:
            return view.pool_pages
        return self._tables.pages.shape[1] + view.num_learned_sink_pages

    def update_masks(self, inputs: StepInputs[Tensor]) -> StepContext:
        """Updates the masks and returns the context of every layer.

        Requires that the page tables are those of the step.
        """
        places = inputs.prefill.places if inputs.prefill else inputs.kv_slots[:0]
        decode = prefill = None
        if inputs.decode is not None:
            bucket = inputs.decode.bucket
            decode = self.decode[bucket]
            self._ends[bucket].update(inputs.decode.last_slot, inputs.decode.block_end)
            for mask, blocks in zip(self.decode_masks[bucket], inputs.decode.blocks, strict=True):
                mask.update(blocks, self._tables.pages, inputs.decode.list_slots)
        if inputs.prefill is not None:
            bucket = inputs.prefill.bucket
            prefill = self.prefill[bucket]
            self._q_positions[bucket].copy_(inputs.prefill.q_positions)
            for tile_mask, tile_blocks in zip(self.prefill_masks[bucket], inputs.prefill.blocks, strict=True):
                tile_mask.update(tile_blocks, self._tables.pages, inputs.prefill.slots)
        return StepContext(
            kv_slots=inputs.kv_slots,
            decode=decode,
            decode_slots=inputs.decode.slots if inputs.decode and not self._shapes.is_padded else None,
            num_decode=inputs.decode.rows.shape[0] if inputs.decode else 0,
            prefill=prefill,
            prefill_places=places,
        )
