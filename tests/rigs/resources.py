"""What requests of tests need on a lane: constraints, and adapters, a second kind that only tests have.

While `adapters()` is open, adapters are in the core's table of kinds. A worker says in `WithAdapters` whether it takes
them; the executor answers orders of both kinds. The core has no line for adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import sha256

from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.reports import WaitReason
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS, Blocks, Kind, Resource
from scheduler_svc.core.messages.worker_info import WorkerInfo

ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class WithAdapters(WorkerInfo):
    """A worker that may take adapters."""

    adapter_refusal: str = ""

    @classmethod
    def of(cls, info: WorkerInfo, refusal: str = "") -> "WithAdapters":
        """Returns the info of the same worker."""
        return cls(adapter_refusal=refusal, **{field.name: getattr(info, field.name) for field in fields(WorkerInfo)})


_OLD = "this worker is older than adapters"
ADAPTERS = Kind(
    name=ADAPTER,
    plural="adapters",
    max_bytes=100,
    max_total_bytes=200,
    answer_seconds=30.0,
    blocks=Blocks.STARTING,
    wait=(WaitReason.CONSTRAINT, "its adapter is being loaded"),
    refusal=lambda info: info.adapter_refusal if isinstance(info, WithAdapters) else _OLD,
)


@contextmanager
def adapters() -> Iterator[None]:
    """Adds adapters to the core's table of kinds."""
    KINDS[ADAPTER] = ADAPTERS
    try:
        yield
    finally:
        del KINDS[ADAPTER]


def are_known() -> bool:
    return ADAPTER in KINDS


def resources_of(constraint: bytes = b"", adapter: bytes = b"") -> tuple[Resource, ...]:
    """Returns what a request needs; an empty source stands for none."""
    sources = {CONSTRAINT: constraint, ADAPTER: adapter}
    return tuple(Resource(kind, sha256(source).digest(), source) for kind, source in sources.items() if source)


def source_of(submit: Submit, kind: str = CONSTRAINT) -> bytes:
    """Returns the source of a request's resource; empty if it has none of the kind."""
    return next((one.source for one in submit.resources if one.kind == kind), b"")
