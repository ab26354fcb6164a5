"""What a request needs on a lane: the table of kinds of resources, one as it comes with a Submit, orders to workers.

A resource is bytes that a worker prepares before it computes the requests that need them. The core names it by kind and
hash, and never reads it. `KINDS` has all that differs between kinds; the rest of the core is the same for all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from scheduler_svc.core.messages.reports import WaitReason
from scheduler_svc.core.messages.worker_info import WorkerInfo

RESOURCE_HASH_BYTES = 32
CONSTRAINT = "constraint"


class Blocks(StrEnum):
    """What a request may not do on a lane before its worker has prepared the resource."""

    SAMPLING = "sampling"
    """Its prompt may be computed up to the last aligned position before its end."""
    STARTING = "starting"
    """It gets no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A request has at most one resource of each kind."""

    name: str
    """In sentences and messages, and the field of a request that a refusal names."""
    plural: str
    max_bytes: int
    """Largest size of one."""
    max_total_bytes: int
    """Largest size of all those that live requests need, together."""
    answer_seconds: float
    """A worker that has not answered an order for this long cannot use the resource."""
    blocks: Blocks
    wait: tuple[WaitReason, str]
    """The sentence for a caller that waits for it."""
    refusal: Callable[[WorkerInfo], str]
    """Returns why a worker takes none, in one sentence; empty if it takes them."""


KINDS: dict[str, Kind] = {
    CONSTRAINT: Kind(
        name=CONSTRAINT,
        plural="constraints",
        max_bytes=64 << 10,
        max_total_bytes=64 << 20,
        # A worker compiles one after another, each for at most 2 s of CPU time, on a slow machine 8 s, so this is
        # enough for those of a burst of requests with slow ones.
        answer_seconds=120.0,
        blocks=Blocks.SAMPLING,
        wait=(WaitReason.CONSTRAINT, "its constraint is being prepared"),
        refusal=lambda info: info.constraint_refusal,
    )
}


class Need(NamedTuple):
    """Names a resource."""

    kind: str
    hash: bytes

    @property
    def of_kind(self) -> Kind:
        """All that its kind decides."""
        return KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class Resource:
    """What a request brings. `hash` is the SHA-256 of `source`."""

    kind: str
    hash: bytes
    source: bytes

    @property
    def need(self) -> Need:
        return Need(self.kind, self.hash)

    @property
    def key(self) -> bytes:
        """Identifies it. For a constraint that is its hash, as in journals of earlier versions."""
        return self.hash if self.kind == CONSTRAINT else self.kind.encode() + self.hash


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResource:
    """The worker is to prepare a resource, and to answer with ResourceReady."""

    worker: str
    hash: bytes
    source: bytes
    kind: str = CONSTRAINT


@dataclass(frozen=True, slots=True, kw_only=True)
class DropResource:
    """No plan in flight uses the resource, and none will before the next PrepareResource."""

    worker: str
    hash: bytes
    kind: str = CONSTRAINT


def takes(info: WorkerInfo, needs: Iterable[Need]) -> bool:
    """Returns whether the worker takes resources of all these kinds."""
    return not any(need.of_kind.refusal(info) for need in needs)


def named(needs: Iterable[Need]) -> str:
    """Returns the kinds of these needs in words: "constraints and adapters"."""
    return " and ".join(need.of_kind.plural for need in needs)
