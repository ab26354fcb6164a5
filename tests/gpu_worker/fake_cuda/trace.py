"""What a step does on the device: its operators, the storages they use, and what crosses between host and device.

Two steps with equal traces are the same work on the same memory, which is what a CUDA graph can replay.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

# Operators that launch nothing: they make views, or memory without contents.
_LAUNCH_NOTHING = frozenset(
    (
        *(
            "_reshape_alias",
            "_unsafe_view",
            "alias",
            "as_strided",
            "detach",
            "expand",
            "is_pinned",
            "permute",
            "select",
        ),
        *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"),
    )
)


@dataclass(frozen=True, slots=True)
class Seen:
    """An operator and its arguments. Each tensor is named by its storage: its address, or its number if it is fresh."""

    operator: str
    tensors: tuple[tuple[object, ...], ...]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A copy between host and device. `waits`: the host waits for it, or may."""

    operator: str
    to_device: bool
    waits: bool


@dataclass(slots=True)
class Trace:
    """The operators of a step in order, as `FakeCuda` sees them."""

    operators: list[Seen] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    # Which of the operators belong to the static part of the step.
    _static: slice = field(default_factory=lambda: slice(0))
    # Storages that were made in this trace, by address: their numbers.
    _fresh: dict[int, int] = field(default_factory=dict)
    # A tensor of each storage by address; the address stays taken while the tensor is kept.
    _kept: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rest(self) -> list[Seen]:
        """The operators before and after the static part."""
        return self.operators[: self._static.start] + self.operators[self._static.stop :]

    @property
    def static_part(self) -> list[Seen]:
        """The operators that a graph would replay."""
        return self.operators[self._static]

    @contextmanager
    def static(self) -> Iterator[None]:
        """The operators within it are the static part. For it, everything made before is at some fixed address."""
        begin = len(self.operators)
        self._fresh.clear()
        yield
        self._static = slice(begin, len(self.operators))

    def begin(self, func: Any, leaves: list[Any]) -> Seen:
        """Returns what an operator is about to use."""
        return Seen(
            str(func),
            tuple(self._described(leaf) for leaf in leaves if isinstance(leaf, Tensor)),
            tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)),
        )

    def end(self, seen: Seen, result: Any) -> None:
        """Adds the operator with its result."""
        self.operators.append(seen)
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._kept:
                self._fresh[self._address(tensor)] = len(self._fresh)

    def cross(self, func: Any, *, to_device: bool, waits: bool) -> None:
        """Adds a crossing."""
        self.crossings.append(Crossing(operator=str(func), to_device=to_device, waits=waits))

    def _address(self, tensor: Tensor) -> int:
        address = tensor.untyped_storage()._cdata
        self._kept.setdefault(address, tensor)
        return address

    def _described(self, tensor: Tensor) -> tuple[object, ...]:
        address, shape, stride = self._address(tensor), tuple(tensor.shape), tensor.stride()
        storage = f"fresh {self._fresh[address]}" if address in self._fresh else address
        return (storage, tensor.storage_offset(), shape, stride, tensor.dtype, tensor.device)


def launches(operators: Sequence[Seen]) -> list[str]:
    """The names of the operators that launch a kernel or a copy."""
    return [seen.operator for seen in operators if seen.operator.split(".")[1] not in _LAUNCH_NOTHING]


def difference(one: Sequence[Seen], other: Sequence[Seen]) -> str:
    """The first difference between two sequences of operators, or an empty text."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"operator {i}: {a} != {b}"
    return f"{len(one)} operators != {len(other)}" if len(one) != len(other) else ""
