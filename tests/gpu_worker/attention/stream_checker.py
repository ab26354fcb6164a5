"""Recorded streams: finds accesses to the same memory from two streams that no event orders.

Operators run at once on the CPU. Each is dated with a vector clock (Mattern 1988): its stream's count, and the counts
of other streams that it is known to follow. Two accesses of which one writes need an order. A tensor that is allocated
within may be used on its own stream only, because a GPU's allocator reuses freed memory in that stream's order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPUTE, COPY = "compute", "copy"
Clock = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operator's access to bytes begin to end of a storage."""

    name: str
    stream: str
    # The count of its stream.
    count: int
    begin: int
    end: int
    writes: bool


class CheckedEvent:
    """`ignores`: the calls that have no effect, record or wait."""

    def __init__(self, streams: "CheckedStreams", ignores: str) -> None:
        self._streams, self._ignores = streams, ignores
        self._recorded: Clock = {}

    def record(self) -> None:
        if self._ignores != "record":
            self._recorded = dict(self._streams.clock)

    def wait(self) -> None:
        if self._ignores != "wait":
            clock = self._streams.clock
            for stream, count in self._recorded.items():
                clock[stream] = max(clock[stream], count)


class CheckedStreams(TorchDispatchMode):
    """Within `with`, dates all operators. `disordered` describes pairs without an order.

    without: (number of an event in the order of creation, "record" or "wait"), which then has no effect.
    """

    def __init__(self, *, without: tuple[int, str] | None = None) -> None:
        super().__init__()
        self._without = without
        self.num_events = 0
        self._clocks: dict[str, Clock] = {name: {COMPUTE: 0, COPY: 0} for name in (COMPUTE, COPY)}
        self._current = COMPUTE
        self._accesses: dict[int, list[Access]] = {}
        self._owners: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self.used: set[str] = set()
        self.disordered: list[str] = []

    @property
    def clock(self) -> Clock:
        """What work enqueued now on the current stream follows."""
        return self._clocks[self._current]

    def event(self) -> CheckedEvent:
        number, ignores = self._without or (-1, "")
        self.num_events += 1
        return CheckedEvent(self, ignores if number == self.num_events - 1 else "")

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self._current = self._current, COPY
        yield
        self._current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        self.clock[self._current] += 1
        self.used.add(self._current)
        given = list(_given(func, args, kwargs))
        for tensor, writes in given:
            self._note(str(func), tensor, writes=writes)
        known = {tensor.untyped_storage()._cdata for tensor, _ in given}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self._owners[tensor.untyped_storage()._cdata] = self._current
                self._note(str(func), tensor, writes=True)
        return result

    def _note(self, name: str, tensor: Tensor, *, writes: bool) -> None:
        if not tensor.numel():
            return
        # A freed storage's address could come back as another storage.
        self._alive.append(tensor)
        storage = tensor.untyped_storage()._cdata
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * tensor.element_size()
        end = begin + (last + 1) * tensor.element_size()
        clock = self.clock
        own = Access(name=name, stream=self._current, count=clock[self._current], begin=begin, end=end, writes=writes)
        if self._owners.get(storage, self._current) != self._current:
            self.disordered.append(f"{name} on {self._current} uses memory that another stream allocated")
        earlier = self._accesses.setdefault(storage, [])
        for other in earlier:
            overlaps = other.begin < end and begin < other.end and (writes or other.writes)
            if overlaps and other.count > clock[other.stream]:
                self.disordered.append(f"{other.name} on {other.stream}, then {name} on {self._current}")
        earlier.append(own)


def _given(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Tensors among the arguments, and whether the operator writes them."""
    for i, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[i] if i < len(args) else None)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                yield tensor, writes
