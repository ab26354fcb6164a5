"""Captured steps of a CPU: every operator that torch dispatches, and every call of a C++ kernel, and their memory.

A replay makes the same calls on the same memory, without the Python in between: numbers that Python computed are
constants. Owns the rules of what can be recorded; a step that needs a tensor's value on the host cannot.

The memory is blocks that a capture takes and gives back, at addresses that stay. Every capture may use all of it,
because a step's values are not needed when the next step begins.
"""

import gc
import logging
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.attention.kv_cache import huge_zeros
from gpu_worker.cpu import operators
from gpu_worker.failures import first_line
from gpu_worker.graphs import Captures, Graph, GraphBackend, NotCapturable, Result
from gpu_worker.native.library import NativeLibrary, RecordedCall, RecordedCalls, native_library, recording
from gpu_worker.trees import leaves, mapped
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

Shape = TypeVar("Shape", bound=Hashable)
Inputs = TypeVar("Inputs")
# A cache line, so that vectors of two blocks share none.
_ALIGNMENT = 64
# The size of huge pages.
_CHUNK_BYTES = 2 << 20
# A call of a kernel, or of an operator with its arguments.
Call = RecordedCall | Callable[[], object]
_aten = torch.ops.aten
UNINITIALISED = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted)
)
_INDEXED = frozenset((_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._index_put_impl_))
_WAITING_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
# The worker's own operators call kernels and operators, which are recorded instead.
_OWN = "tandem::"
_OF_NEW_TENSORS = frozenset(("dtype", "layout", "device", "pin_memory"))


class Arena:
    """Chunks of memory, each divided into blocks that are used or free."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        # Blocks that tensors use.
        self.num_used = 0

    @property
    def num_bytes(self) -> int:
        return sum(chunk.memory.nbytes for chunk in self._chunks)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and type with undefined values. Its block is free again when the last
        tensor on its storage is gone."""
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = -(-max(span, 1) * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        block = torch.from_numpy(self._block(num_bytes)).view(tensor.dtype)
        return block.as_strided(tensor.shape, tensor.stride())

    def borrowed(self, tensor: Tensor) -> Tensor:
        """A tensor on the same memory that keeps no block in use; the tensor itself if that is not the arena's."""
        for chunk in self._chunks if tensor.layout is torch.strided else ():
            begin = tensor.data_ptr() - chunk.address
            if 0 <= begin < chunk.memory.nbytes:
                words = torch.from_numpy(chunk.memory[begin - begin % _ALIGNMENT :]).view(tensor.dtype)
                offset = begin % _ALIGNMENT // tensor.itemsize
                return words.as_strided(tensor.shape, tensor.stride(), offset)
        return tensor

    def _block(self, num_bytes: int) -> NDArray[np.uint8]:
        for chunk in self._chunks:
            if (block := chunk.take(num_bytes)) is not None:
                break
        else:
            chunk = _Chunk(-(-num_bytes // _CHUNK_BYTES) * _CHUNK_BYTES)
            self._chunks.append(chunk)
            block = chunk.take(num_bytes)
            assert block is not None
        self.num_used += 1
        # The storage of a tensor made from the array keeps the array.
        weakref.finalize(block, self._give_back, chunk, block.ctypes.data, num_bytes).atexit = False
        return block

    def _give_back(self, chunk: "_Chunk", address: int, num_bytes: int) -> None:
        chunk.give_back(address - chunk.address, num_bytes)
        self.num_used -= 1


class _Chunk:
    """Memory with a fixed address."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: NDArray[np.uint8] = huge_zeros((num_bytes,), torch.uint8).numpy()
        self.address = self.memory.ctypes.data
        # Free blocks: (begin, end), ascending, none next to another.
        self._free = [(0, num_bytes)]

    def take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """The first free block that is large enough; None without one."""
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                self._free[i : i + 1] = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                return self.memory[begin : begin + num_bytes]
        return None

    def give_back(self, begin: int, num_bytes: int) -> None:
        """Frees a block, and joins it with free neighbours."""
        end = begin + num_bytes
        i = bisect_left(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == begin:
            begin = self._free.pop(i - 1)[0]
        insort(self._free, (begin, end))


class Capture(TorchDispatchMode):
    """Runs operators of this thread and records them; results are in the arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.calls: list[Call] = []
        # Tensors made from host data; a recorded kernel may read their memory.
        self.constants: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.startswith(_OWN):
            with self:
                return func._op_dk(_kernel_of(func), *args, **kwargs)
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.overloadpacket is _aten.lift_fresh:
            self.constants.append(args[0])
            return args[0]
        if needs_value(func, args, kwargs):
            raise NotCapturable(f"{func} needs a value on the host")
        if func.overloadpacket in UNINITIALISED:
            return self._arena.like(func(*args, **kwargs))
        if func is _aten.add.Tensor and not kwargs and _is_plain_sum(*args):
            out = self._arena.like(args[0])
            operators.add(args[0], args[1], out)
            return out
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and records it unless it only makes views."""
        with recording(None):
            result = func(*args, **kwargs)
        of_inputs = {_storage(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        results = result if isinstance(result, (tuple, list)) else (result,)
        fresh = [isinstance(item, Tensor) and _storage(item) not in of_inputs for item in results]
        if not any(fresh):
            if func._schema.is_mutable:
                self.calls.append(partial(func, *self._lasting(args), **self._lasting(kwargs)))
            return result
        if not all(fresh):
            raise NotCapturable(f"{func} returns new tensors and others")
        outs = [self._arena.like(item) for item in results]
        for out, item in zip(outs, results, strict=True):
            out.copy_(item)
        self.calls.append(_writing(func, self._lasting(args), self._lasting(kwargs), self._lasting(tuple(outs))))
        return type(result)(outs) if isinstance(result, (tuple, list)) else outs[0]

    def _lasting(self, value: Any) -> Any:
        """The same arguments for replays. They keep memory outside the arena allocated, and no block in use.

        Captures delay the steps that they record; torch's pytree would make them up to twice as long.
        """
        if isinstance(value, Tensor):
            return self._arena.borrowed(value)
        if isinstance(value, dict):
            return {name: self._lasting(item) for name, item in value.items()}
        return type(value)([self._lasting(item) for item in value]) if isinstance(value, (tuple, list)) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _storage(tensor: Tensor) -> int:
    """Identifies the memory of a tensor; packed weights of a CPU have none that torch shows."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _is_plain_sum(x: Any, y: Any) -> bool:
    """Whether it is a sum that the native operator computes."""
    return (
        isinstance(y, Tensor)
        and x.shape == y.shape
        and x.dim() > 0
        and x.is_contiguous()
        and y.is_contiguous()
        and operators.is_covered(x, y)
    )


@cache
def _kernel_of(func: Any) -> Any:
    """The dispatch key of the implementation that a CPU runs."""
    keys = torch._C.DispatchKey
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return next(key for key in (keys.CPU, keys.CompositeExplicitAutograd) if has(key))


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def needs_value(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's result, or its shape, depends on values that only the host knows."""
    if func.overloadpacket in _INDEXED:
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return bool(_WAITING_TAGS & set(func.tags))


def _writing(func: Any, args: Any, kwargs: dict[str, Any], outs: tuple[Tensor, ...]) -> Callable[[], object]:
    """A call of the operator that writes its results to `outs`."""
    names = _names_of_outs(func)
    if names is not None and len(names[1]) == len(outs):
        # Operators that write to given tensors take neither type nor device.
        named = {name: value for name, value in kwargs.items() if name in names[2]}
        return partial(names[0], *args, **named, **dict(zip(names[1], outs, strict=True)))

    def copied() -> None:
        result = func(*args, **kwargs)
        for out, source in zip(outs, result if isinstance(result, (tuple, list)) else (result,), strict=True):
            out.copy_(source)

    return copied


@cache
def _names_of_outs(func: Any) -> tuple[Any, tuple[str, ...], frozenset[str]] | None:
    """The variant of an operator that writes to given tensors, the names of these, and its other arguments."""
    mine = [(item.name, str(item.type)) for item in func._schema.arguments if item.name not in _OF_NEW_TENSORS]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        given = variant._schema.arguments
        outs = tuple(item.name for item in given if item.is_out)
        others = [(item.name, str(item.type)) for item in given if not item.is_out]
        if outs and others == mine:
            return variant, outs, frozenset(name for name, _ in others)
    return None


class CpuGraph:
    """One captured step. Successive kernels are one call of the library."""

    def __init__(self, library: NativeLibrary, calls: Sequence[Call], constants: Sequence[Tensor] = ()) -> None:
        """constants: tensors that the calls read and nothing else keeps."""
        self._constants = tuple(constants)
        self.parts: list[RecordedCalls | Callable[[], object]] = []
        for is_kernel, group in groupby(calls, key=lambda call: isinstance(call, RecordedCall)):
            part: list[Any] = list(group)
            self.parts += [RecordedCalls(library.functions, part)] if is_kernel else part

    def replay(self) -> None:
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

        Requires inference mode. Raises NotCapturable; what `run` wrote before that stays written.
        """
        capture = Capture(self._arena)
        with recording(capture.calls.append), capture:
            result = run()
        kept: Result = mapped(result, self._arena.borrowed)
        del result
        if self._arena.num_used:
            gc.collect()
        if self._arena.num_used:
            raise NotCapturable(f"{numbered(self._arena.num_used, 'tensor of the step', 'outlive')} it")
        return CpuGraph(self._library, capture.calls, capture.constants), kept


def cpu_graphs() -> CpuGraphs | None:
    """What captures steps on this machine's CPU; None without C++ kernels, because a graph saves their calls."""
    library = native_library()
    return None if library is None else CpuGraphs(library)


@dataclass(slots=True, kw_only=True)
class _Captured(Generic[Result]):
    graph: Graph
    # Overwritten by each replay.
    result: Result
    is_proven: bool = False


class ProvenSteps(Captures[_Captured[Result]], Generic[Shape, Inputs, Result]):
    """The captured steps of a CPU, by shape. They are captured while it serves, and proven before they are used.

    The first step of a shape is captured as it runs. At the second one the graph is replayed beside an ordinary run
    with other inputs: if a bit differs, because Python computed something that the graph has as a constant, the shape
    stays without a graph. From the third one on the graph is replayed.
    """

    def __init__(
        self,
        backend: GraphBackend | None,
        *,
        compute: Callable[[Inputs], Result],
        prepare: Callable[[Inputs], None],
        captures: Callable[[Shape], bool],
        most_graphs: int,
    ) -> None:
        """backend: None: no step is captured. compute: runs a step. prepare: does the part of it that is not captured.
        captures: whether a shape is captured; only the first `most_graphs` shapes are."""
        super().__init__(backend)
        self._compute, self._prepare = compute, prepare
        self._captures, self._most_graphs = captures, most_graphs
        self.num_replays = 0

    def run(self, shape: Shape, inputs: Inputs) -> Result:
        """Returns the results of a step, which the next call overwrites. Inputs of one shape are in the same memory."""
        if self._backend is None:
            return self._compute(inputs)
        captured = self._captured.get(shape)
        if captured is None:
            if shape in self._captured or self.num_graphs >= self._most_graphs or not self._captures(shape):
                return self._compute(inputs)
            return self._capture(self._backend, shape, inputs)
        if not captured.is_proven:
            return self._prove(shape, captured, inputs)
        self._prepare(inputs)
        captured.graph.replay()
        self.num_replays += 1
        return captured.result

    def _capture(self, backend: GraphBackend, shape: Shape, inputs: Inputs) -> Result:
        # Nothing stays half captured, also after an error.
        self._captured[shape] = None
        self._prepare(inputs)
        try:
            graph, result = backend.capture(lambda: self._compute(inputs))
        except Exception as error:  # if the step itself is at fault, the ordinary run raises it too
            level = logging.INFO if isinstance(error, NotCapturable) else logging.WARNING
            log.log(level, "%s runs without a graph: %s", shape, first_line(error))
            return self._compute(inputs)
        self._captured[shape] = _Captured(graph=graph, result=result)
        return result

    def _prove(self, shape: Shape, captured: _Captured[Result], inputs: Inputs) -> Result:
        result = self._compute(inputs)
        self._prepare(inputs)
        captured.graph.replay()
        if all(_has_equal_bits(*pair) for pair in zip(leaves(result), leaves(captured.result), strict=True)):
            captured.is_proven = True
        else:
            log.warning("%s runs without a graph: a replay computed something else", shape)
            self._captured[shape] = None
        return result


def _has_equal_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
