"""The effects of requests that linger: they go on without a reader, and their callers may resume them."""

from dataclasses import dataclass

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.ends import End


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resumed:
    """A request has a new reader, which gets all output so far. Its next tokens come in StepOutputs."""

    frontend: str
    stream: int
    """The stream of the first sample. Sample i has `stream + i`."""
    request_id: str
    description: bytes
    """As in Submit."""
    outputs: tuple[Int32Array, ...]
    """All output tokens of each sample."""
    ends: tuple[End | None, ...]
    """The end of each sample, with its new stream; None while the sample lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Another reader has resumed the request. Nothing more comes for its streams, the first of which is `stream`."""

    frontend: str
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """A request goes on without a reader. No front end gets this.

    Until it is resumed, its StepOutputs have an empty `frontend` and the streams from `stream` on. The core emits them
    only if `CoreConfig.report_detached` is set.
    """

    request_id: str
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """A request that lingered can no longer be resumed: its time is over, it was given up, or memory was needed.

    No front end gets this.
    """

    request_id: str
