"""FlexAttention's kernels and masks for every static shape of a part of a padded step: decode rows, or prompt chunks.

Layers with equal attention patterns share masks, layers of one kind share kernels. A kernel compiles at its first call.
"""

import torch
from torch import Tensor

from gpu_worker.attention.block_mask import DecodeMask, PrefillMask
from gpu_worker.attention.flex_kernel import DecodeAttention, PrefillAttention
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, WriteKv, assign_kv
from gpu_worker.attention.views import GPU_DECODE_BLOCK, View
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.step.device_model import DeviceTables


class FlexKernels:
    """Every kernel that steps of these shapes need, and their masks."""

    def __init__(
        self, layers: LayerMap, geometry: Geometry, shapes: Shapes, tables: DeviceTables, dtype: torch.dtype
    ) -> None:
        self._tables, device = tables, tables.pages.device
        self.write_kv = _writer(tables.pages)
        patterns = dict.fromkeys(kind.pattern for kind in layers.kinds)
        # In the order of `DecodePart.blocks` and `PrefillPart.blocks`.
        self.views = tuple(View.of(pattern, geometry, decode_block=GPU_DECODE_BLOCK) for pattern in patterns)
        # All patterns share them.
        self._ends = {
            bucket: tuple(torch.zeros(bucket, dtype=torch.int32, device=device) for _ in range(2))
            for bucket in shapes.decode_buckets
        }
        self._decode_masks = {
            bucket: {
                view.pattern: DecodeMask(view, list_width=_list_width(view, tables.pages), ends=ends)
                for view in self.views
            }
            for bucket, ends in self._ends.items()
        }
        self._q_positions = {
            bucket: torch.full((bucket,), -1, dtype=torch.int32, device=device) for bucket in shapes.prefill_buckets
        }
        self._sources = {
            bucket: torch.zeros(bucket, dtype=torch.int64, device=device) for bucket in shapes.prefill_buckets
        }
        self._nth_token = torch.arange(shapes.prefill_buckets[-1], device=device)
        self._prefill_masks = {
            bucket: {
                view.pattern: PrefillMask(
                    view,
                    q_positions=q_positions,
                    logical_of_page=tables.logical_of_page,
                    list_width=_list_width(view, tables.pages),
                )
                for view in self.views
            }
            for bucket, q_positions in self._q_positions.items()
        }
        # For each bucket, the kernel of each layer.
        self.decode = {
            bucket: layers.by_layer(lambda kind, masks=masks: DecodeAttention(kind, masks[kind.pattern], dtype=dtype))
            for bucket, masks in self._decode_masks.items()
        }
        self.prefill = {
            bucket: layers.by_layer(lambda kind, masks=masks: PrefillAttention(kind, masks[kind.pattern], dtype=dtype))
            for bucket, masks in self._prefill_masks.items()
        }

    def context(self, inputs: StepInputs[Tensor]) -> StepContext:
        """Updates the masks, and returns the context of every layer.

        Requires that the page tables are those of the step.
        """
        decode = prefill = sources = None
        table, num_decode, places = self._tables.pages, 0, inputs.kv_slots[:0]
        if (part := inputs.decode) is not None:
            assert part.last_slot is not None and part.block_end is not None
            num_decode = part.rows.shape[0]
            decode = self.decode[num_decode]
            for ends, of_step in zip(self._ends[num_decode], (part.last_slot, part.block_end), strict=True):
                ends.copy_(of_step)
            for mask, blocks in zip(self._decode_masks[num_decode].values(), part.blocks, strict=True):
                mask.update(blocks, table, part.rows)
        if (chunks := inputs.prefill) is not None:
            bucket, places = chunks.q_positions.shape[0], chunks.places
            prefill = self.prefill[bucket]
            self._q_positions[bucket].copy_(chunks.q_positions)
            sources = self._sources[bucket].zero_()
            sources.index_copy_(0, places, self._nth_token[: places.shape[0]])
            for mask, blocks in zip(self._prefill_masks[bucket].values(), chunks.blocks, strict=True):
                mask.update(blocks, table, chunks.rows)
        return StepContext(
            kv_slots=inputs.kv_slots,
            write_kv=self.write_kv,
            decode=decode,
            num_decode=num_decode,
            prefill=prefill,
            prefill_places=places,
            prefill_sources=sources,
        )


def _writer(table: Tensor) -> WriteKv:
    """Returns what writes K and V. Without a card, as in tests, Triton may be missing."""
    if not table.is_cuda:
        return assign_kv
    from gpu_worker.cuda.kv_writes import write_kv

    return write_kv


def _list_width(view: View, table: Tensor) -> int:
    """Returns the pages of a list: those of a row. On a CPU, which tests use, FlexAttention requires the pool's."""
    return view.pool_pages if table.is_cpu else table.shape[1] + view.num_learned_sink_pages
