"""Runs one step on the device: page orders, page tables, the static part or its graph, then special samples.

On a GPU it enqueues these operations on the CUDA stream in this order. `DeviceStep` owns all device memory: the model,
the KV pool, kernels, tables, staging buffers. It does not depend on generations or on other plans in flight.

`StaticStep` is the part that a step's shape and its inputs determine: masks, model, tokens of the samples that are not
special. In a padded step it is the same operators on the same memory whenever the shape is the same, so it can be
captured once and replayed. Nothing in it waits for the device or reads a value of it.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.arrays import HostArray, Space
from gpu_worker.attention.host_pages import HostPages
from gpu_worker.attention.kv_cache import KvCache, PoolMemory
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, attach
from gpu_worker.cpu.captured import ProvenSteps
from gpu_worker.cpu.forwards import restore_forwards
from gpu_worker.cuda.graphs import CapturedSteps
from gpu_worker.geometry import Geometry
from gpu_worker.graphs import GraphBackend
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.shapes import MAX_SHAPES, Shapes, StepShape
from gpu_worker.layout.step_layout import StepExtras, StepInputs, StepLayout, allocated, blank
from gpu_worker.process.starting import compiler_is_loaded
from gpu_worker.sampling.choice import greedy_tokens
from gpu_worker.sampling.sampler import choose
from gpu_worker.step.kernels import Kernels
from gpu_worker.step.output import BegunStep, DeviceSampler, ShareTokens, StaticOutput, StepOutput, keep_tokens
from gpu_worker.step.staging import NUM_BUFFERS, DeviceTables, Staging
from gpu_worker.wire.page_orders import PageOrders

if TYPE_CHECKING:
    from gpu_worker.step.fused_layers import FusedLayers


class StaticStep:
    """The static part of steps of one model."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels, tables: DeviceTables, *, is_padded: bool) -> None:
        self._model, self._kernels, self._tables, self._is_padded = model, kernels, tables, is_padded
        self.share_tokens: ShareTokens = keep_tokens

    def __call__(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        """Requires that the page tables are those of the step."""
        context = self._kernels.update_masks(inputs)
        ids, samples, newest = inputs.token_ids, inputs.samples, self._tables.newest_token
        if inputs.decode is not None:
            rows = inputs.decode.rows
            own = ids[: rows.shape[0]]
            known = torch.where(own < 0, newest.index_select(0, rows), own)
            if rows.shape == ids.shape:
                ids = known
            else:
                own.copy_(known)
        logits = self._forward(ids, inputs.positions, None if _samples_every_token(inputs) else samples.kept, context)
        if logits is None or not (self._is_padded or inputs.prefill is None):
            return StaticOutput(logits=logits, tokens=None)
        own = logits[: samples.rows.shape[0]]
        if not self._is_padded:
            return StaticOutput(logits=logits, tokens=greedy_tokens(own))
        tokens = choose(own, samples.drawing)
        self.share_tokens(tokens)
        newest.index_copy_(0, samples.rows, tokens.clamp(min=0))
        return StaticOutput(logits=logits, tokens=tokens)

    def _forward(self, ids: Tensor, positions: Tensor, kept: Tensor | None, context: StepContext) -> Tensor | None:
        """Returns logits [kept, vocabulary] of the packed tokens `kept` (None: of all), or None if `kept` is empty."""
        arguments = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "step": context,
        }
        if kept is None:
            return self._model(**arguments).logits[0]
        if kept.numel() == 0:
            self._model.base_model(**arguments)
            return None
        return self._model(**arguments, logits_to_keep=kept).logits[0]


def _samples_every_token(inputs: StepInputs[Tensor]) -> bool:
    """Whether the samples are the packed tokens in their order, padding aside, as in every step of decode rows alone.

    Taking them by an index would cost as much as a small layer there.
    """
    return inputs.prefill is None and inputs.samples.kept.shape == inputs.token_ids.shape


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
        graphs: GraphBackend | None,
        captures: Callable[[StepShape], bool],
        native: bool,
        memory: PoolMemory | None = None,
    ) -> None:
        self.device = device
        self.tables = DeviceTables(geometry, device)
        self._geometry, self._no_rows = geometry, RowTables(geometry)
        self._sampler = DeviceSampler(geometry, device, is_padded=shapes.is_padded)
        self.cache = KvCache(
            layers,
            num_pages=geometry.num_pages,
            page_size=geometry.page_size,
            dtype=dtype,
            device=device,
            memory=memory,
        )
        attach(model, layers, self.cache)
        self._model = model
        self.fused: FusedLayers | None = None
        self.host = HostPages(self.cache, geometry.host_pages)
        self.kernels = Kernels(layers, geometry, shapes, self.cache, self.tables, native=native)
        self._static_step = StaticStep(model, self.kernels, self.tables, is_padded=shapes.is_padded)
        self.is_padded, self._captures = shapes.is_padded, captures
        self.graphs = CapturedSteps[StaticOutput](graphs if shapes.is_padded else None)
        # The captured decode steps of a CPU.
        self.proven: ProvenSteps[StepShape, StepInputs[Tensor], StaticOutput] | None = None
        if graphs is not None and not shapes.is_padded and self.kernels.decode_is_native:
            self.proven = ProvenSteps(
                graphs, compute=self._static, prepare=self.kernels.prepare, captures=captures, most_graphs=MAX_SHAPES
            )
        self._staging = Staging(device, NUM_BUFFERS, input_words=self._most_words(shapes))
        # Logits of the last step, its samples first. The next step overwrites them. None if it had no samples.
        self.last_logits: Tensor | None = None
        self.pool_is_zero = True
        self.may_compile = True

    def share_tokens(self, share: ShareTokens) -> None:
        """Lets the ranks of a group agree on tokens from now on; before steps are captured."""
        self._sampler.share_tokens = self._static_step.share_tokens = share

    def fuse_layers(self) -> None:
        """Lets the decoder layers compile during warm-up."""
        from gpu_worker.step.fused_layers import FusedLayers

        restore_forwards(self._model)
        self.fused = FusedLayers(self._model)
        # Compiled layers cannot be captured on a CPU.
        self.proven = None

    def free_memory(self) -> None:
        """Gives back what a step that ran out of memory left behind.

        The caller no longer holds the exception, whose traceback held tensors. If a frame refers to the exception, they
        form a cycle, so garbage is collected too.
        """
        self.last_logits = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def zero_pool(self) -> None:
        """Zeroes every page, unless the pool is zero already."""
        if not self.pool_is_zero:
            self.cache.zero()
            self.pool_is_zero = True

    def zero_pages(self, pages: NDArray[np.integer]) -> None:
        """Zeroes the pages in every layer, independently of any plan."""
        self.cache.zero_pages(torch.from_numpy(pages.astype(np.int64)).to(self.device))

    @torch.inference_mode()
    def begin(self, orders: PageOrders[HostArray], layout: StepLayout[HostArray] | None) -> BegunStep | None:
        """Carries out page orders, then computes logits. Returns None if there is nothing to compute."""
        self.pool_is_zero = False
        others = (orders or None, None) if layout is None else (orders or None, layout.extras)
        inputs: StepInputs[Tensor]
        staged: PageOrders[Tensor] | None
        extras: StepExtras[Tensor] | None
        inputs, (staged, extras) = self._staging.upload(None if layout is None else layout.inputs, others)
        if staged is not None:
            self._carry_out(orders, staged)
        if layout is None or extras is None:
            return None
        edits = inputs.edits if layout.has_static_edits else extras.edits
        if edits is not None:
            self.tables.set_pages(edits)
        static = self._computed(layout.shape, inputs)
        self.last_logits = static.logits
        return BegunStep(static=static, samples=inputs.samples, extras=extras.sampling)

    @torch.inference_mode()
    def finish(self, begun: BegunStep, masks: Tensor | None = None) -> StepOutput:
        """Computes the tokens and logprobs of the step that was begun last. masks: as for `DeviceSampler.finish`."""
        if begun.static.logits is None:
            return StepOutput(tokens=begun.samples.rows[:0])
        output = self._sampler.finish(begun.static, begun.samples, begun.extras, masks)
        if not self.is_padded or begun.extras is not None:
            self.tables.newest_token.index_copy_(0, begun.samples.rows, output.tokens.clamp(min=0))
        return output

    def _computed(self, shape: StepShape, inputs: StepInputs[Tensor]) -> StaticOutput:
        if self.proven is not None and _is_decode_step(shape):
            return self.proven.run(shape, inputs)
        static = self.graphs.replay(shape)
        return self._static(inputs) if static is None else static

    def _static(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        with self._compilation():
            return self._static_step(inputs)

    def _compilation(self) -> AbstractContextManager[None]:
        """After warm-up nothing compiles, because it would delay every request: a layer runs eagerly instead, and a
        kernel raises."""
        if not compiler_is_loaded():
            return nullcontext()
        if self.may_compile:
            from gpu_worker.step.fused_layers import compiling

            return compiling()
        return torch.compiler.set_stance("eager_on_recompile")

    @torch.inference_mode()
    def warm_up(self, shape: StepShape) -> None:
        """Compiles what a padded step of this shape needs, and captures it. Changes row 0 and page 0 alone."""
        # The second run measures kernels that the first has loaded.
        for _ in range(2):
            self._static(self._blank_inputs(shape))
        if self.graphs.is_enabled and self._captures(shape):
            inputs = self._blank_inputs(shape)
            self.graphs.capture(shape, lambda: self._static(inputs))

    def _blank_inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        inputs = self.place(shape)
        assert inputs is not None
        blank(inputs, self._no_rows, self.kernels.views)
        on_device, _ = self._staging.upload(inputs, None)
        return on_device

    def place(self, shape: StepShape) -> StepInputs[HostArray] | None:
        """Returns the inputs of the next step, to be written, if steps of its shape have theirs in the same memory.

        They are valid until the step runs.
        """
        views = self.kernels.views
        if self.is_padded:
            return self._staging.inputs(shape, partial(allocated, shape, self._geometry, views))
        if self.proven is None or not _is_decode_step(shape):
            return None
        return self._staging.shared(shape, partial(allocated, shape, self._geometry, views, num_decode=shape.tokens))

    def _most_words(self, shapes: Shapes) -> int | None:
        """Returns the words of the largest inputs of a padded step; None if steps are not padded."""
        spaces = [Space() for _ in shapes.steps]
        for shape, space in zip(shapes.steps, spaces, strict=True):
            allocated(shape, self._geometry, self.kernels.views, space)
        # A step may need logits of prompt tokens besides those of the shape's samples.
        return max([space.used for space in spaces]) + self._geometry.logit_rows if spaces else None

    def _carry_out(self, orders: PageOrders[HostArray], staged: PageOrders[Tensor]) -> None:
        """Follows worker.proto's sequence, because one plan may save a page, zero it and load others into it.

        Copies from host memory start first, because they need nothing of the device but their buffers.
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


def _is_decode_step(shape: StepShape) -> bool:
    return shape.prefill == 0 and shape.prompt_logits == 0
