"""Captured steps of a CPU: recorded calls of kernels and operators, replayed without Python between kernels."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby

from torch import Tensor

from gpu_worker.cpu_graphs.arena import Arena
from gpu_worker.cpu_graphs.capture import Call, Capture
from gpu_worker.graphs.backend import NotCapturable, Result
from gpu_worker.native.calls import RecordedCall, RecordedCalls, recording
from gpu_worker.native.library import NativeLibrary, native_library
from gpu_worker.trees import mapped


class CpuGraph:
    """One captured step. Successive kernels are one call of the library."""

    def __init__(self, library: NativeLibrary, calls: Sequence[Call], constants: Sequence[Tensor] = ()) -> None:
        """constants: tensors that the calls read and nothing else keeps."""
        self._constants = tuple(constants)
        self.parts: list[RecordedCalls | Callable[[], object]] = []
        for is_kernel, group in groupby(calls, key=lambda call: isinstance(call, RecordedCall)):
            if is_kernel:
                kernels = [call for call in group if isinstance(call, RecordedCall)]
                self.parts.append(RecordedCalls(library.functions, kernels))
            else:
                self.parts += [call for call in group if not isinstance(call, RecordedCall)]

    def replay(self) -> None:
        """Makes every call again."""
        for part in self.parts:
            part()


class CpuGraphs:
    """A GraphBackend of a CPU. All graphs share one memory."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._arena = Arena()

    @property
    def pool_bytes(self) -> int:
        return self._arena.num_bytes

    def capture(self, run: Callable[[], Result]) -> tuple[CpuGraph, Result]:
        """Runs `run` and captures it. Its results are those of the run, and valid until the next capture or replay.

        Requires inference mode. Raises NotCapturable; whatever `run` wrote before that stays written.
        """
        capture = Capture(self._arena)
        with ExitStack() as stack:
            stack.enter_context(recording(capture))
            stack.enter_context(capture)
            result = run()
        kept: Result = mapped(result, self._borrowed)
        del result
        if self._arena.num_used:
            gc.collect()
        if self._arena.num_used:
            raise NotCapturable(f"{self._arena.num_used} tensors of the step outlive it")
        return CpuGraph(self._library, capture.calls, capture.constants), kept

    def _borrowed(self, tensor: Tensor) -> Tensor:
        found = self._arena.borrowed(tensor)
        return tensor if found is None else found


def cpu_graphs() -> CpuGraphs | None:
    """What captures steps on this machine's CPU; None without C++ kernels, whose calls are what a graph saves."""
    library = native_library()
    return None if library is None else CpuGraphs(library)
