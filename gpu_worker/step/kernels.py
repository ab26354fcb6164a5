"""The attention kernels of one worker: C++ kernels on a CPU that can build them, else FlexAttention's.

`Kernels` chooses for decode rows and for prompt chunks, and tells the kernels of each step. FlexAttention is imported
only if it is chosen, because that takes seconds.
"""

from typing import TypeVar

import torch
from torch import Tensor

from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.operator import StepContext
from gpu_worker.attention.views import GPU_DECODE_BLOCK, View
from gpu_worker.cpu_attention.decode import NativeDecode
from gpu_worker.cpu_attention.prefill import NativePrefill
from gpu_worker.cpu_attention.write import KvWriter
from gpu_worker.geometry import Geometry
from gpu_worker.layout.shapes import Shapes
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.native.library import NativeLibrary, native_library
from gpu_worker.step.device_tables import DeviceTables

NativeKernels = TypeVar("NativeKernels", NativeDecode, NativePrefill)


class Kernels:
    """Every kernel that steps of this geometry may need; those of FlexAttention compile at their first call."""

    def __init__(
        self,
        layers: LayerMap,
        geometry: Geometry,
        shapes: Shapes,
        cache: KvCache,
        tables: DeviceTables,
        *,
        native: bool = True,
    ) -> None:
        """native: whether C++ kernels may be used. Padded steps never use them, because graphs cannot capture them."""
        self._shapes, self._tables = shapes, tables
        # In the order of `DecodePart.blocks` and `PrefillPart.blocks`.
        decode_block = GPU_DECODE_BLOCK if shapes.is_padded else None
        patterns = dict.fromkeys(kind.pattern for kind in layers.kinds)
        views = tuple(View.of(pattern, geometry, decode_block=decode_block) for pattern in patterns)
        dtype = cache.keys[0].dtype
        library = native_library() if native and tables.pages.is_cpu and not shapes.is_padded else None
        self._write = KvWriter.of(library, dtype)
        self._native_decode = self._native_of(NativeDecode, library, layers, geometry, dtype)
        self._native_prefill = self._native_of(NativePrefill, library, layers, geometry, dtype)
        self._flex_decode = self._flex_prefill = None
        # For each bucket, the kernel of each layer. Layers of one kind share a kernel.
        if self._native_decode is not None:
            self.decode = {shapes.decode_buckets[0]: self._native_decode.kernels}
        else:
            from gpu_worker.step.flex_kernels import FlexDecode

            self._flex_decode = FlexDecode(layers, shapes, tables, views, dtype)
            self.decode = self._flex_decode.kernels
        if self._native_prefill is not None:
            self.prefill = {shapes.prefill_buckets[0]: self._native_prefill.kernels}
        else:
            from gpu_worker.step.flex_kernels import FlexPrefill

            self._flex_prefill = FlexPrefill(layers, shapes, tables, views, dtype)
            self.prefill = self._flex_prefill.kernels
        # What a step's block lists are laid out for. C++ kernels read the page table, so without FlexAttention there
        # are none.
        self.views = () if self._flex_decode is None and self._flex_prefill is None else views

    def _native_of(
        self,
        family: type[NativeKernels],
        library: NativeLibrary | None,
        layers: LayerMap,
        geometry: Geometry,
        dtype: torch.dtype,
    ) -> NativeKernels | None:
        if library is None or not all(family.covers(kind, dtype) for kind in layers.kinds):
            return None
        return family(library, layers, self._tables.pages, page_size=geometry.page_size, dtype=dtype)

    @property
    def decode_is_native(self) -> bool:
        """Whether a C++ kernel attends for decode rows."""
        return self._native_decode is not None

    def prepare(self, inputs: StepInputs[Tensor]) -> None:
        """Tells the C++ kernel of a step's decode rows."""
        assert self._native_decode is not None and inputs.decode is not None and inputs.decode.slots is not None
        self._native_decode.update(inputs.decode.slots, inputs.positions[: inputs.decode.rows.shape[0]])

    def update_masks(self, inputs: StepInputs[Tensor]) -> StepContext:
        """Tells the kernels of the step, and returns the context of every layer.

        Requires that the page tables are those of the step.
        """
        decode = prefill = decode_slots = None
        num_decode, places = 0, inputs.kv_slots[:0]
        if inputs.decode is not None:
            decode, num_decode = self.decode[inputs.decode.bucket], inputs.decode.rows.shape[0]
            if self._native_decode is not None:
                self.prepare(inputs)
            else:
                self._flex_decode.update(inputs.decode)
                decode_slots = None if self._shapes.is_padded else inputs.decode.slots
        if inputs.prefill is not None:
            prefill, places = self.prefill[inputs.prefill.bucket], inputs.prefill.places
            if self._native_prefill is not None:
                self._native_prefill.update(inputs.prefill.slots, inputs.prefill.q_positions)
            else:
                self._flex_prefill.update(inputs.prefill)
        return StepContext(
            kv_slots=inputs.kv_slots,
            write_kv=self._write,
            decode=decode,
            decode_slots=decode_slots,
            num_decode=num_decode,
            decode_in_place=self._native_decode is not None,
            prefill=prefill,
            prefill_places=places,
            prefill_in_place=self._native_prefill is not None,
        )
