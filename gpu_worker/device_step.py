"""One step on the device: page tables, masks, model, sampling, newest tokens, all enqueued in stream order.

Owns everything that lives on the device: the model, the KV pool, kernels, tables, staging buffers. Knows nothing of
plans, generations or what is in flight.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.attention.kernels import Kernels
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, attach
from gpu_worker.geometry import Geometry
from gpu_worker.sampling.output import Sampling, StepOutput
from gpu_worker.shapes import Shapes
from gpu_worker.slots import DeviceTables, RowTables
from gpu_worker.staging import Staging
from gpu_worker.step import StepLayout
from gpu_worker.upload import step_arrays


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
        layers = layers.within(geometry.max_length)
        attach(model, layers)
        self.cache = KvCache(
            layers, num_pages=geometry.num_pages, page_size=geometry.page_size, dtype=dtype, device=device
        )
        self.kernels = Kernels(layers, geometry, shapes, self.cache, self.tables)
        self.pool_is_zero = True
        self.may_compile = True

    def zero_pool(self) -> None:
        """Zeroes every page, unless all are."""
        if not self.pool_is_zero:
            self.cache.zero()
            self.pool_is_zero = True

    def zero_pages(self, pages: NDArray[np.integer]) -> None:
        """Zeroes these pages in every layer."""
        self.cache.zero_pages(torch.from_numpy(pages.astype(np.int64)).to(self.device))

    @torch.inference_mode()
    def run(self, layout: StepLayout, tables: RowTables) -> StepOutput:
        """Tokens and logprobs of one step, on the device. `tables` are the host's, the plan's differences applied."""
        self.pool_is_zero = False
        staged = self._staging.upload(step_arrays(layout, tables, self.tables.slot_of_row))
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
