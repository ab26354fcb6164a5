"""The attention kernels of one worker: FlexAttention's for padded steps, else C++ kernels or torch's operators.

`Kernels` chooses for decode rows and for prompt chunks, and tells the kernels of each step. FlexAttention is imported
only if it is chosen, because that takes seconds; nothing else needs a compiler.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import InPlaceKernel, QueryKernel, StepContext
from gpu_worker.attention.views import GPU_DECODE_BLOCK, View
from gpu_worker.cpu.attention import KvWriter, NativeDecode, NativePrefill
from gpu_worker.cpu.gathered import GatheredDecode, GatheredPrefill
from gpu_worker.geometry import Geometry
from gpu_worker.layout.shapes import Shapes
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.native.library import NativeLibrary, native_library
from gpu_worker.step.staging import DeviceTables

NativeKernels = TypeVar("NativeKernels", NativeDecode, NativePrefill)


class Kernels:
    """Every kernel that steps of this geometry may need; those of FlexAttention compile at their first call."""

    # For each bucket, the kernel of each layer. Layers of one kind share a kernel.
    decode: Mapping[int, Sequence[QueryKernel] | Sequence[InPlaceKernel]]
    prefill: Mapping[int, Sequence[QueryKernel] | Sequence[InPlaceKernel]]

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
        self._is_padded, self._layers, self._pages = shapes.is_padded, layers, tables.pages
        self._page_size, self._dtype = geometry.page_size, cache.keys[0].dtype
        library = native_library() if native and not shapes.is_padded else None
        self._write = None if library is None else KvWriter(library, self._dtype)
        # What a step's block lists are laid out for. Kernels of steps that are not padded read the page table itself.
        self.views: tuple[View, ...] = ()
        if shapes.is_padded:
            self._use_flex(geometry, shapes, tables)
            return
        self._decode = self._native_of(NativeDecode, library) or GatheredDecode(
            layers, tables.pages, page_size=self._page_size
        )
        self._prefill = self._native_of(NativePrefill, library) or GatheredPrefill(
            layers, tables.pages, page_size=self._page_size
        )
        self.decode = {shapes.decode_buckets[0]: self._decode.kernels}
        self.prefill = {shapes.prefill_buckets[0]: self._prefill.kernels}

    def _use_flex(self, geometry: Geometry, shapes: Shapes, tables: DeviceTables) -> None:
        from gpu_worker.step.flex_kernels import FlexDecode, FlexPrefill

        # In the order of `DecodePart.blocks` and `PrefillPart.blocks`.
        patterns = dict.fromkeys(kind.pattern for kind in self._layers.kinds)
        self.views = tuple(View.of(pattern, geometry, decode_block=GPU_DECODE_BLOCK) for pattern in patterns)
        self._flex_decode = FlexDecode(self._layers, shapes, tables, self.views, self._dtype)
        self._flex_prefill = FlexPrefill(self._layers, shapes, tables, self.views, self._dtype)
        self.decode, self.prefill = dict(self._flex_decode.kernels), dict(self._flex_prefill.kernels)

    def _native_of(self, family: type[NativeKernels], library: NativeLibrary | None) -> NativeKernels | None:
        if library is None or not all(family.covers(kind, self._dtype) for kind in self._layers.kinds):
            return None
        return family(library, self._layers, self._pages, page_size=self._page_size, dtype=self._dtype)

    @property
    def decode_is_native(self) -> bool:
        """Whether a C++ kernel attends for decode rows."""
        return not self._is_padded and isinstance(self._decode, NativeDecode)

    def prepare(self, inputs: StepInputs[Tensor]) -> None:
        """Tells the kernel of the decode rows of a step that is not padded."""
        assert inputs.decode is not None
        self._decode.update(inputs.decode.rows, inputs.positions[: inputs.decode.rows.shape[0]])

    def update_masks(self, inputs: StepInputs[Tensor]) -> StepContext:
        """Tells the kernels of the step, and returns the context of every layer.

        Requires that the page tables are those of the step.
        """
        decode = prefill = None
        num_decode, places = 0, inputs.kv_slots[:0]
        if inputs.decode is not None:
            decode, num_decode = self.decode[inputs.decode.bucket], inputs.decode.rows.shape[0]
            if self._is_padded:
                self._flex_decode.update(inputs.decode)
            else:
                self.prepare(inputs)
        if inputs.prefill is not None:
            prefill, places = self.prefill[inputs.prefill.bucket], inputs.prefill.places
            if self._is_padded:
                self._flex_prefill.update(inputs.prefill)
            else:
                self._prefill.update(inputs.prefill.rows, inputs.prefill.q_positions)
        return StepContext(
            kv_slots=inputs.kv_slots,
            write_kv=self._write,
            decode=decode,
            num_decode=num_decode,
            prefill=prefill,
            prefill_places=places,
            in_place=not self._is_padded,
        )
