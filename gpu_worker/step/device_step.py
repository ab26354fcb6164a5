"""Runs one step on the device: page orders, page tables, masks, model, sampling, newest tokens.

On a GPU it enqueues these operations on the CUDA stream in this order. `DeviceStep` owns all device memory: the model,
the KV pool, kernels, tables, staging buffers. It does not depend on generations or on other plans in flight.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.arrays import Array, HostArray
from gpu_worker.attention.host_pages import HostPages
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, attach
from gpu_worker.fusion.layers import FusedLayers, compiling
from gpu_worker.geometry import Geometry
from gpu_worker.step.kernels import Kernels
from gpu_worker.step.layout import StepLayout
from gpu_worker.step.output import DeviceSampler, StepOutput
from gpu_worker.step.row_tables import DeviceTables
from gpu_worker.step.shapes import Shapes
from gpu_worker.step.staging import Staging
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
        self._sampler = DeviceSampler(geometry, device)
        self._staging = Staging(device, num_buffers)
        self.cache = KvCache(
            layers, num_pages=geometry.num_pages, page_size=geometry.page_size, dtype=dtype, device=device
        )
        attach(model, layers, self.cache)
        self.fused: FusedLayers | None = None
        self.host = HostPages(self.cache, geometry.host_pages)
        self.kernels = Kernels(layers, geometry, shapes, self.cache, self.tables)
        self.pool_is_zero = True
        self.may_compile = True

    def fuse_layers(self) -> None:
        """Lets the decoder layers compile during warm-up."""
        self.fused = FusedLayers(self._model)

    def zero_pool(self) -> None:
        """Zeroes every page, unless the pool is zero already."""
        if not self.pool_is_zero:
            self.cache.zero()
            self.pool_is_zero = True

    def zero_pages(self, pages: NDArray[np.integer]) -> None:
        """Zeroes the pages in every layer, independently of any plan."""
        self.cache.zero_pages(torch.from_numpy(pages.astype(np.int64)).to(self.device))

    @torch.inference_mode()
    def run(self, orders: PageOrders[HostArray], layout: StepLayout[HostArray] | None) -> StepOutput | None:
        """Carries out page orders, then computes tokens and logprobs. Returns None if there is nothing to compute."""
        self.pool_is_zero = False
        staged: _StepArrays[Tensor] = self._staging.upload(
            _StepArrays(layout=layout, orders=orders if orders else None)
        )
        if staged.orders is not None:
            self._carry_out(orders, staged.orders)
        return None if staged.layout is None else self._compute(staged.layout)

    def _carry_out(self, orders: PageOrders[HostArray], staged: PageOrders[Tensor]) -> None:
        """Follows worker.proto's sequence, because one plan may save a page, zero it and load others into it."""
        if orders.saved_pages.size:
            self.host.save(staged.saved_pages, orders.saved_slots)
        if orders.zeroed.size:
            self.cache.zero_pages(staged.zeroed)
        if orders.copied_to.size:
            self.cache.copy_pages(staged.copied_from, staged.copied_to, staged.copied_tokens)
        if orders.loaded_pages.size:
            self.host.load(staged.loaded_pages, orders.loaded_slots)

    def _compute(self, layout: StepLayout[Tensor]) -> StepOutput:
        self.tables.set_pages(layout.edits)
        context = self.kernels.update_masks(layout)
        ids, samples = layout.token_ids, layout.samples
        if layout.decode is not None:
            num_decode = layout.decode.rows.shape[0]
            newest = self.tables.newest_token.index_select(0, layout.decode.rows)
            ids[:num_decode] = torch.where(ids[:num_decode] < 0, newest, ids[:num_decode])
        logits = self._forward(ids, layout.positions, samples.kept, context)
        if logits is None:
            return StepOutput(tokens=ids[:0])
        output = self._sampler.run(logits, samples)
        self.tables.newest_token.index_copy_(0, samples.rows, output.tokens.clamp(min=0))
        return output

    def _forward(self, ids: Tensor, positions: Tensor, kept: Tensor, context: StepContext) -> Tensor | None:
        """Returns logits [kept, vocabulary] of the packed tokens `kept`, or None if `kept` is empty."""
        # After warm-up nothing compiles, because it would delay every request: a layer runs eagerly instead, and a
        # kernel raises.
        settings = compiling() if self.may_compile else torch.compiler.set_stance("eager_on_recompile")
        arguments = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "step": context,
        }
        with settings:
            if kept.numel() == 0:
                self._model.base_model(**arguments)
                return None
            return self._model(**arguments, logits_to_keep=kept).logits[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepArrays(Generic[Array]):
    """Every array that one step uploads."""

    layout: StepLayout[Array] | None
    orders: PageOrders[Array] | None
