"""One step on the device: page orders, page tables, masks, model, sampling, newest tokens, enqueued in stream order.

Owns everything that lives on the device: the model, the KV pool, kernels, tables, staging buffers. Knows nothing of
plans, generations or what is in flight.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.attention.host_pages import HostPages
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, attach
from gpu_worker.geometry import Geometry
from gpu_worker.step.kernels import Kernels
from gpu_worker.step.layout import StepLayout
from gpu_worker.step.output import Sampling, StepOutput
from gpu_worker.step.row_tables import DeviceTables, RowTables
from gpu_worker.step.shapes import Shapes
from gpu_worker.step.staging import Staging
from gpu_worker.step.upload import order_arrays, step_arrays
from gpu_worker.wire.page_orders import PageOrders


class DeviceStep:
    """One model on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: LayerMap,
        geometry: Geometry,
        shapes: Shapes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_buffers: int,
    ) -> None:
        self.device = device
        self._model = model
        self.tables = DeviceTables(geometry, device)
        self._sampling = Sampling(geometry, device)
        self._staging = Staging(device, num_buffers)
        attach(model, layers)
        self.cache = KvCache(
            layers, num_pages=geometry.num_pages, page_size=geometry.page_size, dtype=dtype, device=device
        )
        self.host = HostPages(self.cache, geometry.host_pages)
        self.kernels = Kernels(layers, geometry, shapes, self.cache, self.tables)
        self.pool_is_zero = True
        self.may_compile = True

    def zero_pool(self) -> None:
        """Zeroes every page, unless all are."""
        if not self.pool_is_zero:
            self.cache.zero()
            self.pool_is_zero = True

    def zero_pages(self, pages: NDArray[np.integer]) -> None:
        """Zeroes these pages in every layer, outside any plan."""
        self.cache.zero_pages(torch.from_numpy(pages.astype(np.int64)).to(self.device))

    @torch.inference_mode()
    def run(self, orders: PageOrders, layout: StepLayout | None, tables: RowTables) -> StepOutput | None:
        """Page orders, then tokens and logprobs of one step, on the device; None where nothing is computed.

        `tables` are the host's, the plan's differences applied.
        """
        self.pool_is_zero = False
        arrays = {} if layout is None else step_arrays(layout, tables, self.tables.slot_of_row)
        staged = self._staging.upload(arrays | order_arrays(orders) if orders else arrays)
        if orders:
            self._carry_out(orders, staged)
        return None if layout is None else self._compute(layout, staged, tables)

    def _carry_out(self, orders: PageOrders, staged: Mapping[str, Tensor]) -> None:
        """In worker.proto's order. What a save takes may be zeroed and given to a row that loads, in one plan."""
        if orders.saved_pages.size:
            self.host.save(staged["saved_pages"], orders.saved_slots)
        if orders.zeroed.size:
            self.cache.zero_pages(staged["zeroed"])
        if orders.copied_to.size:
            self.cache.copy_pages(staged["copied_from"], staged["copied_to"], staged["copied_tokens"])
        if orders.loaded_pages.size:
            self.host.load(staged["loaded_pages"], orders.loaded_slots)

    def _compute(self, layout: StepLayout, staged: Mapping[str, Tensor], tables: RowTables) -> StepOutput:
        self.tables.set_pages(staged["edit_slots"], staged["edit_cols"], staged["edit_pages"])
        context = self.kernels.context(layout, staged)
        ids = staged["token_ids"]
        if layout.decode is not None:
            num_decode = layout.decode.rows.size
            newest = self.tables.newest_token.index_select(0, staged["decode_rows"])
            ids[:num_decode] = torch.where(ids[:num_decode] < 0, newest, ids[:num_decode])
        logits = self._forward(ids, staged["positions"], staged["kept_tokens"], context)
        if logits is None:
            return StepOutput(tokens=ids[:0])
        output = self._sampling.run(logits, layout.samples, staged, tables)
        self.tables.newest_token.index_copy_(0, staged["sample_rows"], output.tokens.clamp(min=0))
        return output

    def _forward(self, ids: Tensor, positions: Tensor, keep: Tensor, context: StepContext) -> Tensor | None:
        """Logits [kept, vocabulary] of the packed tokens `keep`; None where there are none."""
        stance = "default" if self.may_compile else "fail_on_recompile"
        arguments = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "step": context,
        }
        with torch.compiler.set_stance(stance):
            if keep.numel() == 0:
                self._model.base_model(**arguments)
                return None
            return self._model(**arguments, logits_to_keep=keep).logits[0]
