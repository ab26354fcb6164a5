"""Captured graphs on a CPU: a backend that records operators and plays them back, as strict as a CUDA graph.

While `run` of a capture executes, a dispatch mode records every operator with its arguments and results. A replay plays
the same operators on the same memory; Python does not run, and every number that Python computed is a constant. What
CUDA would compute wrong or read from freed memory is an error or a different result here:

- A value that the host needs (`item`, `nonzero`, a boolean index, `numpy`) raises NotCapturable.
- A tensor made from host data (`torch.tensor`, `torch.from_numpy`) keeps the values that it had at the capture.
- The recorder keeps no reference to memory that existed before the capture. A replay raises DanglingMemory if that
  memory was freed, reallocated or resized.
- Memory that was allocated in a capture is in the pool of all graphs of the recorder. With `poison`, every replay first
  overwrites the pool with garbage: no value outlives the next replay, and none that the graph has not written is seen.
- Operators of another thread, and numpy on a tensor's memory, are not recorded: a replay leaves their work out.
- Collective calls of torch.distributed are recorded, and made again by every replay.

`opaque` names methods, each recorded as one operator from tensors to fresh tensors. Compiled functions must be among
them: Dynamo refuses to run them under a dispatch mode. `transparent` names operators that are recorded by what they
call; operators that find some of their tensors through Python must be among them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpu_worker.cpu.graphs import UNINITIALISED, needs_value
from gpu_worker.graphs import NotCapturable

Result = TypeVar("Result")
# A class and the name of its method.
Method = tuple[type, str]

_aten = torch.ops.aten


class DanglingMemory(RuntimeError):
    """A replay would read or write memory that was freed, reallocated or resized after the capture."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's memory: its storage, as an index into the graph's storages, and the view of it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor: the index of its place."""

    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A recorded operator. In `arguments`, a flattened tree, slots stand for tensors."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    tree: Any
    # The fresh tensors among the results, by their index in the flattened result.
    written: tuple[tuple[int, _Slot], ...]


class _Outside:
    """A storage that existed before the capture. Only its address and size are kept."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)
        self._address, self._num_bytes = storage.data_ptr(), storage.nbytes()

    def resolve(self) -> torch.UntypedStorage:
        """Returns the storage. Raises DanglingMemory."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is None:
            raise DanglingMemory(f"memory of {self._num_bytes} bytes that the graph uses was freed after the capture")
        if (storage.data_ptr(), storage.nbytes()) != (self._address, self._num_bytes):
            raise DanglingMemory(f"memory of {self._num_bytes} bytes that the graph uses was moved or resized")
        return storage


def garbage(dtype: torch.dtype) -> float | int | bool:
    """Returns a value that no computation hides: NaN, or an index outside every table."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


class RecordedGraph:
    """One capture's operators and the memory they use."""

    def __init__(self, poison: "Callable[[RecordedGraph], None]") -> None:
        self._poison = poison
        self._nodes: list[_Node] = []
        self._places: list[_Place] = []
        # By index: pool storages are kept alive, those from outside are not.
        self._storages: list[torch.UntypedStorage | _Outside] = []
        # What the capture allocated, each storage as one tensor of the type it was allocated for.
        self.pool: list[Tensor] = []
        self.num_replays = 0

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the recorded operators, in order."""
        return tuple(node.name for node in self._nodes)

    def replay(self) -> None:
        """Plays the operators back on the recorded memory. Raises DanglingMemory before the first of them."""
        self.num_replays += 1
        storages = [one.resolve() if isinstance(one, _Outside) else one for one in self._storages]
        with torch.inference_mode(), _disable_current_modes():
            tensors = [place.on(storages[place.storage]) for place in self._places]
            self._poison(self)
            for node in self._nodes:
                leaves = [tensors[leaf.place] if isinstance(leaf, _Slot) else leaf for leaf in node.arguments]
                args, kwargs = tree_unflatten(leaves, node.tree)
                results = tree_flatten(node.run(*args, **kwargs))[0]
                for i, slot in node.written:
                    tensors[slot.place].copy_(results[i])


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective call, with the wait for its end: in a CUDA graph the stream waits."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        result[-1].wait()
        return result

    return call


class _Capture(TorchDispatchMode):
    """Records into a graph what this thread computes."""

    def __init__(self, graph: RecordedGraph, transparent: Sequence[str]) -> None:
        super().__init__()
        self._transparent = frozenset(transparent)
        self._nodes, self._places, self._storages, self._pool = graph._nodes, graph._places, graph._storages, graph.pool
        self._slot_of: dict[_Place, _Slot] = {}
        # Index into the storages by address of torch's storage object, which stays taken while references are held.
        self._idx_of: dict[int, int] = {}

    @property
    def is_active(self) -> bool:
        return self in _get_current_dispatch_mode_stack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in self._transparent:
            with self:
                return func._op_dk(_kernel_of(func), *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if needs_value(func, args, kwargs):
            raise NotCapturable(f"{func} needs a value on the host")
        if func.overloadpacket is _aten.lift_fresh:
            return self.constant(args[0])
        if func.namespace == "c10d":
            return self.record(str(func), _waiting(func), args, kwargs)
        return self.record(str(func), func, args, kwargs, uninitialised=func.overloadpacket in UNINITIALISED)

    def record(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, *, uninitialised: bool = False) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        recorded = tuple(self._slot(leaf) if _has_storage(leaf) else leaf for leaf in leaves)
        result = run(*args, **kwargs)
        fresh = [
            (i, self._slot(leaf, allocated=True))
            for i, leaf in enumerate(tree_flatten(result)[0])
            if _has_storage(leaf) and leaf.untyped_storage()._cdata not in self._idx_of
        ]
        is_view = not fresh and hasattr(run, "_schema") and not run._schema.is_mutable
        if not uninitialised and not is_view:
            self._nodes.append(_Node(name=name, run=run, arguments=recorded, tree=tree, written=tuple(fresh)))
        return result

    def constant(self, host: Tensor) -> Tensor:
        """Records a copy of host data: the graph writes the values of now at each replay."""
        snapshot = host.clone()
        return self.record("constant", snapshot.clone, (), {})

    def _slot(self, tensor: Tensor, *, allocated: bool = False) -> _Slot:
        storage = tensor.untyped_storage()
        idx = self._idx_of.setdefault(storage._cdata, len(self._storages))
        if idx == len(self._storages):
            self._storages.append(storage if allocated else _Outside(storage))
            if allocated:
                whole = torch.empty(0, dtype=tensor.dtype)
                self._pool.append(whole.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)))
        place = _Place(idx, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if place not in self._slot_of:
            self._slot_of[place] = _Slot(len(self._places))
            self._places.append(place)
        return self._slot_of[place]


def _has_storage(leaf: object) -> bool:
    """Whether it is a tensor in plain memory. Weights that a CPU has packed are not; a graph keeps them as they are."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _kernel_of(func: Any) -> Any:
    """Returns the dispatch key of the implementation that a CPU runs. Raises NotCapturable."""
    keys = torch._C.DispatchKey
    for key in (keys.CPU, keys.CompositeExplicitAutograd, keys.CompositeImplicitAutograd):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return key
    raise NotCapturable(f"{func} has no implementation for a CPU")


class GraphRecorder:
    """A GraphBackend with recorded operators as graphs."""

    def __init__(self, *, opaque: Sequence[Method] = (), transparent: Sequence[str] = (), poison: bool = True) -> None:
        """transparent: names such as "tandem::attend"."""
        self.graphs: list[RecordedGraph] = []
        self._opaque, self._transparent, self._poisons = opaque, transparent, poison
        # The graph that was captured or replayed last.
        self._last: RecordedGraph | None = None

    @property
    def pool_bytes(self) -> int:
        """Memory that all captures allocated."""
        return sum(tensor.nbytes for graph in self.graphs for tensor in graph.pool)

    def capture(self, run: Callable[[], Result]) -> tuple[RecordedGraph, Result]:
        """Records `run`. Raises NotCapturable."""
        graph = RecordedGraph(self._poison)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            capture = _Capture(graph, self._transparent)
            for owner, name in self._opaque:
                stack.enter_context(_recorded_as_one(owner, name, capture))
            stack.enter_context(_host_data_is_constant(capture))
            stack.enter_context(capture)
            result = run()
        self.graphs.append(graph)
        # As with a CUDA graph, the results exist only after a replay.
        with torch.inference_mode():
            self._poison(graph)
        return graph, result

    def _poison(self, graph: RecordedGraph) -> None:
        """Overwrites the memory of all graphs, which share one pool: any replay may overwrite any graph's results.

        Only that of two graphs can still hold something else: the graph's, and that of the graph before it.
        """
        last, self._last = self._last, graph
        if self._poisons:
            for tensor in (*graph.pool, *(last.pool if last else ())):
                tensor.fill_(garbage(tensor.dtype))


@contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces an attribute, which a class may inherit."""
    own = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def _recorded_as_one(owner: type, name: str, capture: _Capture) -> Iterator[None]:
    original = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return capture.record(f"{owner.__name__}.{name}", original, args, kwargs)

    with _replaced(owner, name, recorded):
        yield


@contextmanager
def _host_data_is_constant(capture: _Capture) -> Iterator[None]:
    """Within it, arrays become constants, and a tensor refuses to become an array or a list.

    Other threads, and the inside of an opaque method, are not concerned.
    """
    from_numpy = torch.from_numpy

    def constant(array: np.ndarray[Any, Any]) -> Tensor:
        if not capture.is_active:
            return from_numpy(array)
        with _disable_current_modes():
            return capture.constant(from_numpy(array))

    def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
        def refused(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if capture.is_active:
                raise NotCapturable(f"a tensor's values are needed on the host, by {read.__name__}")
            return read(tensor, *args, **kwargs)

        return refused

    with (
        _replaced(torch, "from_numpy", constant),
        _replaced(Tensor, "numpy", refusing(Tensor.numpy)),
        _replaced(Tensor, "tolist", refusing(Tensor.tolist)),
    ):
        yield
