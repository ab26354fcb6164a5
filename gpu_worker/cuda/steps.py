"""The steps of a GPU: each is padded to one of few shapes, captured as a CUDA graph, and enqueued while others run.

The *static part* of a step is what its shape and its inputs determine: masks, model, tokens of the samples that are not
special. It is the same operators on the same memory whenever the shape is the same, so it is captured once and
replayed. Nothing in it waits for the device or reads a value of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_worker.arrays import HostArray, Space
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.graphs import CapturedSteps
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.cuda.staging import NUM_BUFFERS, ResultRing, Staging, Stream, pinned_masks
from gpu_worker.graphs import GraphBackend
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.samples import SampledRows
from gpu_worker.layout.step_layout import StepInputs, StepShape, allocated, write_inputs
from gpu_worker.sampling.logits import TokenHistory
from gpu_worker.sampling.sampler import EditedLogits, choose, revise
from gpu_worker.step.backend import MaskUpload, StepTimer
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.output import BegunStep, StaticOutput, StepOutput, output_of
from gpu_worker.step.warm_up import rehearsals
from gpu_worker.wire.frames import Plan
from tandem_contract.plural import numbered


class PaddedSteps:
    """The `StepBackend` of a GPU."""

    compiles = True

    def __init__(
        self,
        on_device: DeviceModel,
        shapes: Shapes,
        stream: Stream,
        *,
        graphs: GraphBackend | None,
        captures: Callable[[StepShape], bool],
    ) -> None:
        """graphs: captures the shapes for which `captures` holds; None: every step runs eagerly."""
        self._on_device, self.shapes, self._captures = on_device, shapes, captures
        geometry, cache = on_device.geometry, on_device.cache
        self.kernels = FlexKernels(on_device.layers, geometry, shapes, on_device.tables, cache.keys[0].dtype)
        self.views = self.kernels.views
        self.graphs = CapturedSteps[StaticOutput](graphs)
        self._history = TokenHistory(geometry, on_device.device)
        self.stream = stream
        self._staging = Staging(stream, on_device.device, NUM_BUFFERS, input_words=self._most_words())
        # The next step overwrites what a step has computed.
        self.results = ResultRing(num_buffers=NUM_BUFFERS, num_tokens=geometry.max_rows, allocate=stream.pinned)

    @property
    def summary(self) -> str:
        if not self.graphs.is_enabled:
            return ""
        return (
            f"{self.graphs.num_graphs} of {numbered(len(self.shapes.steps), 'step shape')} captured as graphs, "
            f"{self.graphs.pool_bytes >> 20} MiB of memory, {self.graphs.seconds:.2f} s"
        )

    def inputs_of(self, need: StepShape) -> tuple[StepShape, StepInputs[HostArray]]:
        """Returns the cheapest shape that holds the step, and its inputs in pinned memory."""
        shape = self.shapes.fitting(need)
        if need.prompt_logits:
            shape = replace(shape, prompt_logits=need.prompt_logits)
        return shape, self._inputs_of(shape)

    def _inputs_of(self, shape: StepShape) -> StepInputs[HostArray]:
        return self._staging.inputs(shape, partial(allocated, shape, self._on_device.geometry, self.views))

    def upload(self, inputs: Any, extras: Any) -> tuple[Any, Any]:
        """Starts one copy of both to the device."""
        return self._staging.upload(inputs, extras)

    def run(self, shape: StepShape, inputs: StepInputs[Tensor]) -> StaticOutput:
        """Enqueues the static part, or its graph."""
        static = self.graphs.replay(shape)
        return self._static(inputs) if static is None else static

    def _static(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        with self._on_device.compiling():
            return self._static_part(inputs)

    def _static_part(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        samples = inputs.samples
        logits = self._on_device.logits(inputs, self.kernels.context(inputs))
        assert logits is not None, "every shape has samples"
        tokens = choose(logits[: samples.rows.shape[0]], samples.drawing)
        self._on_device.share_tokens(tokens)
        self._on_device.set_newest(samples.rows, tokens)
        return StaticOutput(logits=logits, tokens=tokens)

    @torch.inference_mode()
    def finish(self, begun: BegunStep, masks: Tensor | None) -> StepOutput:
        """Chooses the tokens that the static part could not choose, and starts the copies to the host."""
        if begun.extras is None:
            assert begun.static.tokens is not None
            return self.results.to_host(StepOutput(tokens=begun.static.tokens))
        output = output_of(begun, masks, self._history, revised, self._on_device.share_tokens)
        self._on_device.set_newest(begun.samples.rows, output.tokens)
        return self.results.to_host(output)

    def put_back(self, output: StepOutput) -> None:
        self.results.put_back(output)

    def timer(self) -> StepTimer:
        return StepTimer(self.stream.event(timed=True), self.stream.event(timed=True))

    def mask_upload(self, *, max_rows: int, mask_words: int) -> MaskUpload:
        return pinned_masks(self.stream, self._on_device.device, max_rows=max_rows, mask_words=mask_words)

    def warm_up_steps(self, rehearse: Callable[..., object]) -> Iterator[tuple[str, Callable[[], object]]]:
        """The largest shapes first, so that graphs share memory; then what is not captured."""
        for shape in reversed(self.shapes.steps):
            yield str(shape), partial(self.warm_up, shape)
        yield from rehearsals(rehearse, self._on_device.geometry)

    @torch.inference_mode()
    def warm_up(self, shape: StepShape) -> None:
        """Compiles what a step of this shape needs, and captures it. Changes row 0 and page 0 alone."""
        self._static(self._blank_inputs(shape))
        # The second run measures kernels that the first has loaded; a capture has one of its own.
        inputs = self._blank_inputs(shape)
        if self.graphs.is_enabled and self._captures(shape):
            self.graphs.capture(shape, lambda: self._static(inputs))
        else:
            self._static(inputs)

    def _blank_inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        """Inputs in which every row and token is padding."""
        inputs, tables = self._inputs_of(shape), RowTables(self._on_device.geometry)
        plan = Plan(generation=0, step=0, checksum=0)
        write_inputs(inputs, plan, tables, self.views, SampledRows.of(plan, tables))
        on_device, _ = self.upload(inputs, None)
        return on_device

    def _most_words(self) -> int:
        spaces = [Space() for _ in self.shapes.steps]
        for shape, space in zip(self.shapes.steps, spaces, strict=True):
            allocated(shape, self._on_device.geometry, self.views, space)
        # A step may need logits of prompt tokens besides those of the shape's samples.
        return max(space.used for space in spaces) + self._on_device.geometry.logit_rows


def revised(begun: BegunStep, logits: Tensor, edited: EditedLogits | None) -> Tensor:
    """Chooses again what the static part cannot choose: edited logits, and samples with late filters."""
    tokens, extras = begun.static.tokens, begun.extras
    assert tokens is not None and extras is not None
    revise(tokens, logits, begun.samples.drawing, edited=edited, late=extras.late)
    return tokens
