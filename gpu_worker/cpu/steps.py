"""The steps of a CPU: they have the sizes of their plans, and tensors that share the memory of the host's arrays.

Attention is computed by C++ kernels, or by torch's operators. Steps of decode rows alone are captured as they come
(`graphs.py`); their inputs have the same memory whenever they have as many rows.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.arrays import HostArray, Space
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import StepContext, assign_kv
from gpu_worker.attention.views import View
from gpu_worker.cpu.attention import KvWriter, NativeDecode, NativePrefill
from gpu_worker.cpu.gathered import GatheredDecode, GatheredPrefill
from gpu_worker.cpu.graphs import ProvenSteps
from gpu_worker.geometry import Geometry
from gpu_worker.graphs import GraphBackend
from gpu_worker.layout.step_layout import MAX_SHAPES, StepInputs, StepShape, allocated
from gpu_worker.native.library import native_library
from gpu_worker.sampling.choice import greedy_tokens
from gpu_worker.sampling.logits import TokenHistory
from gpu_worker.sampling.sampler import EditedLogits, sample
from gpu_worker.step.backend import MaskUpload
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.output import BegunStep, StaticOutput, StepOutput, output_of
from gpu_worker.step.warm_up import rehearsals, warm_up_plan
from gpu_worker.trees import mapped

# At a start, for captured steps.
_CAPTURE_SECONDS = 1.0
NativeKernels = TypeVar("NativeKernels", NativeDecode, NativePrefill)


class CpuKernels:
    """The attention kernels of one worker."""

    def __init__(
        self, layers: LayerMap, geometry: Geometry, table: Tensor, dtype: torch.dtype, *, native: bool = True
    ) -> None:
        """table: the page table. native: whether C++ kernels may be used."""
        library, own_size = native_library() if native else None, geometry.page_size

        def native_of(family: type[NativeKernels]) -> NativeKernels | None:
            if library is None or not all(family.covers(kind, dtype) for kind in layers.kinds):
                return None
            return family(
                layers.by_layer(lambda kind: family.kernel(library, kind, table, page_size=own_size, dtype=dtype))
            )

        self._write = assign_kv if library is None else KvWriter(library, dtype)
        self._decode = native_of(NativeDecode) or GatheredDecode(layers, table, page_size=own_size)
        self._prefill = native_of(NativePrefill) or GatheredPrefill(layers, table, page_size=own_size)
        self.decode_is_native = isinstance(self._decode, NativeDecode)
        # The kernel of each layer.
        self.decode, self.prefill = self._decode.kernels, self._prefill.kernels

    def prepare(self, inputs: StepInputs[Tensor]) -> None:
        assert inputs.decode is not None
        self._decode.update(inputs.decode.rows, inputs.positions[: inputs.decode.rows.shape[0]])

    def context(self, inputs: StepInputs[Tensor]) -> StepContext:
        """Gives the kernels the step, and returns the context of every layer."""
        num_decode, places = 0, inputs.kv_slots[:0]
        if inputs.decode is not None:
            num_decode = inputs.decode.rows.shape[0]
            self.prepare(inputs)
        if inputs.prefill is not None:
            places = inputs.prefill.places
            self._prefill.update(inputs.prefill.rows, inputs.prefill.q_positions)
        return StepContext(
            kv_slots=inputs.kv_slots,
            write_kv=self._write,
            decode=None if inputs.decode is None else self.decode,
            num_decode=num_decode,
            prefill=None if inputs.prefill is None else self.prefill,
            prefill_places=places,
            in_place=True,
        )


class PlainSteps:
    """The `StepBackend` of a CPU."""

    # The kernels read the page table.
    views: tuple[View, ...] = ()
    compiles = False
    summary = ""

    def __init__(
        self,
        on_device: DeviceModel,
        *,
        graphs: GraphBackend | None,
        captures: Callable[[StepShape], bool],
        native: bool = True,
    ) -> None:
        """graphs: captures steps of decode rows alone, if a C++ kernel attends for them, and `captures` holds for their
        shape. native: whether attention may use C++ kernels."""
        self._on_device = on_device
        geometry, dtype = on_device.geometry, on_device.cache.keys[0].dtype
        self.kernels = CpuKernels(on_device.layers, geometry, on_device.tables.pages, dtype, native=native)
        self.graphs = ProvenSteps[StepShape, StepInputs[Tensor], StaticOutput](
            graphs if self.kernels.decode_is_native else None,
            compute=self._static,
            prepare=self.kernels.prepare,
            captures=captures,
            most_graphs=MAX_SHAPES,
        )
        self._history = TokenHistory(geometry, on_device.device)
        # By number of rows, the inputs of steps of decode rows alone.
        self._placed: dict[int, tuple[StepShape, StepInputs[HostArray], StepInputs[Tensor]]] = {}

    def inputs_of(self, need: StepShape) -> tuple[StepShape, StepInputs[HostArray]]:
        """Returns the step's own sizes; parameters of rows that draw are extras."""
        if not need.prefill and (placed := self._placed.get(need.decode)) is not None:
            return placed[:2]
        shape = replace(need, draws=False)
        inputs = allocated(shape, self._on_device.geometry, self.views, Space())
        if not need.prefill:
            self._placed[need.decode] = shape, inputs, mapped(inputs, torch.from_numpy)
        return shape, inputs

    def upload(self, inputs: StepInputs[HostArray] | None, extras: Any) -> tuple[Any, Any]:
        """As `StepBackend.upload`. Nothing is copied."""
        if inputs is None or inputs.prefill is not None:
            on_device = mapped(inputs, torch.from_numpy)
        else:
            on_device = self._placed[inputs.token_ids.size][2]
        return on_device, mapped(extras, torch.from_numpy)

    def run(self, shape: StepShape, inputs: StepInputs[Tensor]) -> StaticOutput:
        """Computes logits and, in a step of decode rows alone, the tokens of greedy samples."""
        return self._static(inputs) if shape.prefill else self.graphs.run(shape, inputs)

    def _static(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        with self._on_device.compiling():
            logits = self._on_device.logits(inputs, self.kernels.context(inputs))
            if logits is None or inputs.prefill is not None:
                return StaticOutput(logits=logits, tokens=None)
            return StaticOutput(logits=logits, tokens=greedy_tokens(logits[: inputs.samples.rows.shape[0]]))

    @torch.inference_mode()
    def finish(self, begun: BegunStep, masks: Tensor | None) -> StepOutput:
        if begun.static.logits is None:
            return StepOutput(tokens=begun.samples.rows[:0])
        output = output_of(begun, masks, self._history, sampled, self._on_device.share_tokens)
        self._on_device.set_newest(begun.samples.rows, output.tokens)
        return output

    def put_back(self, output: StepOutput) -> None:
        """Results have memory of their own."""

    def timer(self) -> None:
        """Work has ended when its call returns."""

    def mask_upload(self, *, max_rows: int, mask_words: int) -> MaskUpload:
        """As `StepBackend.mask_upload`. Masks are read where they were written."""
        shared = torch.zeros(max_rows, mask_words, dtype=torch.int32)

        def upload(num_rows: int, write: Callable[[NDArray[np.int32]], None]) -> Tensor:
            write(shared[:num_rows].numpy())
            return shared[:num_rows].view(torch.uint8)

        return upload

    def warm_up_steps(self, rehearse: Callable[..., object]) -> Iterator[tuple[str, Callable[[], object]]]:
        """One step of each kind, then captured steps."""
        yield from rehearsals(rehearse, self._on_device.geometry)
        if self.graphs.is_enabled:
            yield "captured decode steps", partial(self._capture_decode_steps, rehearse)

    def _capture_decode_steps(self, rehearse: Callable[..., object]) -> None:
        """Captures and proves decode steps, few rows first, for a limited time; others follow while serving.

        A step that is captured or proven takes twice as long as usual.
        """
        ends = time.perf_counter() + _CAPTURE_SECONDS
        for num_rows in range(1, self._on_device.geometry.max_rows + 1):
            if time.perf_counter() > ends:
                break
            first = warm_up_plan(num_rows=num_rows, chunk=False)
            rehearse(first, replace(first, step=2, started=None))


def sampled(begun: BegunStep, logits: Tensor, edited: EditedLogits | None) -> Tensor:
    """Chooses all tokens, or keeps the greedy ones that the step has."""
    greedy, extras = begun.static.tokens, begun.extras
    if extras is not None:
        return sample(logits, extras.drawing, edited)
    # The next step overwrites those of this one.
    return sample(logits, None) if greedy is None else greedy.clone()
