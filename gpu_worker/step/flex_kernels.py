"""FlexAttention's kernels and masks for every static shape of a part of a padded step: decode rows, or prompt chunks.

Layers with equal attention patterns share masks, layers of one kind share kernels. A kernel compiles at its first call.
This module imports FlexAttention, so it is imported only where a part needs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.attention.block_mask import DecodeEnds, DecodeMask, PrefillMask
from gpu_worker.attention.flex_kernel import DecodeAttention, PrefillAttention
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.views import View
from gpu_worker.layout.attention_parts import DecodePart, PrefillPart
from gpu_worker.layout.shapes import Shapes
from gpu_worker.step.staging import DeviceTables


class FlexDecode:
    """The decode kernels."""

    def __init__(
        self, layers: LayerMap, shapes: Shapes, tables: DeviceTables, views: Sequence[View], dtype: torch.dtype
    ) -> None:
        self._tables = tables
        self._ends = {bucket: DecodeEnds(bucket, tables.pages.device) for bucket in shapes.decode_buckets}
        self._masks = {
            bucket: {
                view.pattern: DecodeMask(view, block_lists=self._block_lists(view, bucket), ends=ends) for view in views
            }
            for bucket, ends in self._ends.items()
        }
        # For each bucket, the kernel of each layer.
        self.kernels = {
            bucket: layers.by_layer(lambda kind, own=own: DecodeAttention(kind, own[kind.pattern], dtype=dtype))
            for bucket, own in self._masks.items()
        }

    def _block_lists(self, view: View, bucket: int) -> Tensor:
        """Returns int32 [slots, width]."""
        table = self._tables.pages
        width = _list_width(view, table) * view.blocks_per_page
        return torch.zeros(bucket, width, dtype=torch.int32, device=table.device)

    def update(self, part: DecodePart[Tensor]) -> None:
        """Updates the masks; requires that the page tables are those of the step."""
        assert part.last_slot is not None and part.block_end is not None
        self._ends[part.bucket].update(part.last_slot, part.block_end)
        for mask, blocks in zip(self._masks[part.bucket].values(), part.blocks, strict=True):
            mask.update(blocks, self._tables.pages, part.rows)


class FlexPrefill:
    """The prefill kernels."""

    def __init__(
        self, layers: LayerMap, shapes: Shapes, tables: DeviceTables, views: Sequence[View], dtype: torch.dtype
    ) -> None:
        self._tables = tables
        device = tables.pages.device
        self._q_positions = {
            bucket: torch.full((bucket,), -1, dtype=torch.int32, device=device) for bucket in shapes.prefill_buckets
        }
        self._masks = {
            bucket: {
                view.pattern: PrefillMask(
                    view,
                    q_positions=q_positions,
                    logical_of_page=tables.logical_of_page,
                    list_width=_list_width(view, tables.pages),
                )
                for view in views
            }
            for bucket, q_positions in self._q_positions.items()
        }
        # For each bucket, the kernel of each layer.
        self.kernels = {
            bucket: layers.by_layer(lambda kind, own=own: PrefillAttention(kind, own[kind.pattern], dtype=dtype))
            for bucket, own in self._masks.items()
        }

    def update(self, part: PrefillPart[Tensor]) -> None:
        """Updates the masks; requires that the page tables are those of the step."""
        self._q_positions[part.bucket].copy_(part.q_positions)
        for mask, blocks in zip(self._masks[part.bucket].values(), part.blocks, strict=True):
            mask.update(blocks, self._tables.pages, part.rows)


def _list_width(view: View, table: Tensor) -> int:
    """Returns the pages of a list. The CPU kernel requires the pool's pages, others only those of a row."""
    return view.pool_pages if table.is_cpu else table.shape[1] + view.num_learned_sink_pages
