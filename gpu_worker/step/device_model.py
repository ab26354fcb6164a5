"""A model on one device: its KV pool, the tables that kernels read, and its forward.

Owns the device memory that lasts from step to step. Knows nothing of generations, of plans in flight, or of how steps
of a kind of device run.
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.arrays import HostArray
from gpu_worker.attention.host_pages import HostPages
from gpu_worker.attention.kv_cache import KvCache, PoolMemory
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, attach
from gpu_worker.geometry import Geometry
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.process.starting import compiler_is_loaded
from gpu_worker.step.output import ShareTokens, keep_tokens
from gpu_worker.wire.page_orders import PageOrders

if TYPE_CHECKING:
    from gpu_worker.step.fused_layers import FusedLayers


class DeviceTables:
    """The tables that kernels read: the page table, each page's logical index, newest tokens."""

    def __init__(self, geometry: Geometry, device: torch.device, *, width: int | None = None) -> None:
        """width: logical pages of a line; by default those of a row, which is the least."""
        num_rows = geometry.max_rows + 1
        self.pages = torch.zeros(num_rows, width or geometry.pages_per_row, dtype=torch.int32, device=device)
        # A page that several rows share has the same logical index in each. The last entry is for the learned sinks.
        self.logical_of_page = torch.zeros(geometry.num_pages + 1, dtype=torch.int32, device=device)
        # The newest token of each row; row 0 is padding.
        self.newest_token = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def set_pages(self, edits: Tensor) -> None:
        """Applies a plan's edits of the page table, as `RowTables.apply` returns them."""
        rows, cols, pages = edits.unbind()
        self.pages.index_put_((rows, cols), pages.int())
        self.logical_of_page.index_put_((pages,), cols.int())


class DeviceModel:
    """One model on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: LayerMap,
        geometry: Geometry,
        *,
        device: torch.device,
        dtype: torch.dtype,
        memory: PoolMemory | None = None,
        table_width: int | None = None,
    ) -> None:
        """memory: of the KV pool. table_width: as in `DeviceTables`."""
        self.device, self.layers = device, layers.within(geometry.max_length)
        window, sink_tokens = self.layers.reach
        self.geometry = replace(geometry, window=window, sink_tokens=sink_tokens)
        self.tables = DeviceTables(geometry, device, width=table_width)
        self.cache = KvCache(
            self.layers,
            num_pages=geometry.num_pages,
            page_size=geometry.page_size,
            dtype=dtype,
            device=device,
            memory=memory,
        )
        attach(model, self.layers, self.cache)
        self.model = model
        # The decoder layers, if they compile during the warm-up.
        self.fused: FusedLayers | None = None
        self.host = HostPages(self.cache, geometry.host_pages)
        # Lets the ranks of a group agree on tokens; set before steps are captured.
        self.share_tokens: ShareTokens = keep_tokens
        # Logits of the last step, its samples first. The next step overwrites them. None if it had no samples.
        self.last_logits: Tensor | None = None
        self.pool_is_zero = True
        self.may_compile = True

    def logits(self, inputs: StepInputs[Tensor], context: StepContext) -> Tensor | None:
        """Returns logits [samples + prompt tokens, vocabulary] of a step, or None if it has none.

        Requires that the page tables are those of the step. Fills in the ids of `inputs` that the host does not know.
        """
        ids, kept = inputs.token_ids, inputs.samples.kept
        if inputs.decode is not None:
            rows = inputs.decode.rows
            given = ids[: rows.shape[0]]
            filled = torch.where(given < 0, self.tables.newest_token.index_select(0, rows), given)
            if rows.shape == ids.shape:
                ids = filled
            else:
                given.copy_(filled)
        arguments = {
            "input_ids": ids[None],
            "position_ids": inputs.positions[None],
            "use_cache": False,
            "step": context,
        }
        if inputs.prefill is None and kept.shape == ids.shape:
            # Decode rows alone: the samples are the packed tokens in their order, padding aside. Taking them by an
            # index would cost as much as a small layer.
            return self.model(**arguments).logits[0]
        if kept.numel() == 0:
            self.model.base_model(**arguments)
            return None
        return self.model(**arguments, logits_to_keep=kept).logits[0]

    def compiling(self) -> AbstractContextManager[object]:
        """Every forward runs within it. After warm-up nothing compiles, because it would delay every request: a layer
        runs eagerly instead, and a kernel raises."""
        if not compiler_is_loaded():
            return nullcontext()
        if self.may_compile:
            from gpu_worker.step.fused_layers import compiling

            return compiling()
        return torch.compiler.set_stance("eager_on_recompile")

    def set_newest(self, rows: Tensor, tokens: Tensor) -> None:
        """Keeps the tokens that rows sampled, both int64 [samples], for the next step."""
        self.tables.newest_token.index_copy_(0, rows, tokens.clamp(min=0))

    def carry_out(self, orders: PageOrders[HostArray], staged: PageOrders[Tensor]) -> None:
        """Follows worker.proto's sequence, because one plan may save a page, zero it and load others into it.

        staged: the same orders on the device. Copies from host memory start first, because they need nothing of the
        device but their buffers.
        """
        num_fetched = 0
        if orders.loaded_pages.size:
            num_fetched = self.host.fetch(orders.loaded_slots, orders.saved_slots)
        if orders.saved_pages.size:
            self.host.save(staged.saved_pages, orders.saved_slots)
        if orders.zeroed.size:
            self.cache.zero_pages(staged.zeroed)
        if orders.copied_to.size:
            self.cache.copy_pages(staged.copied_from, staged.copied_to, staged.copied_tokens)
        if orders.loaded_pages.size:
            self.host.load(staged.loaded_pages, orders.loaded_slots, num_fetched)

    def zero_pool(self) -> None:
        if not self.pool_is_zero:
            self.cache.zero()
            self.pool_is_zero = True

    def zero_pages(self, pages: NDArray[np.integer]) -> None:
        """Zeroes the pages in every layer, independently of any plan."""
        self.cache.zero_pages(torch.from_numpy(pages.astype(np.int64)).to(self.device))

    def free_memory(self) -> None:
        """Gives back what a step that ran out of memory left behind.

        The caller no longer holds the exception, because its traceback held tensors. If a frame refers to the
        exception, they form a cycle, so garbage is collected too.
        """
        self.last_logits = None
        gc.collect()
        # Does nothing in a process that has not used CUDA.
        torch.cuda.empty_cache()
