"""The terminal answer of a request, and the effects of requests that outlive their reader."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.core.messages.arrays import Int32Array


class EndReason(StrEnum):
    """Why an accepted request ended without an error."""

    EOS = "eos"
    STOP_TOKEN = "stop token"
    STOP_STRING = "stop string"
    LENGTH = "length"
    TIME_LIMIT = "time limit"
    ABORTED = "aborted"
    CONTEXT_FULL = "context full"
    CONSTRAINT_COMPLETE = "constraint complete"


class FailureCode(StrEnum):
    """Why an accepted request failed."""

    INTERNAL = "internal"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    NO_WORKER = "no worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that ended a request. `message` is one sentence."""

    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpan:
    """The output tokens from `from_token` to the next span were sampled with these weights."""

    from_token: int
    version: str


MAX_COUNT = (1 << 32) - 1
"""The largest count in an answer: `Usage` and `Timing` have uint32. A count that would be larger stays there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Tokens and times of one request, sent at its end. No count is above MAX_COUNT."""

    prompt_tokens: int
    output_tokens: int
    """Tokens of the output. A stop string may end it before the last sampled token."""
    discarded_tokens: int
    """Tokens sampled after the end of the output, including those that are still in flight."""
    recomputed_tokens: int
    """Positions computed more than once, because of preemptions and lane resets."""
    cached_prompt_tokens: int
    """Prompt tokens found in the prefix cache when the request got its first row."""
    queue_seconds: float
    """From arrival to the first row."""
    prefill_seconds: float
    """From the first row to the first output token."""
    first_token_seconds: float
    """From arrival to the first output token."""
    decode_seconds: float
    """From the first output token to the last."""
    total_seconds: float
    """From arrival to the end."""
    preemptions: int
    worker_changes: int
    """Lane resets while the request was running."""
    weights: tuple[WeightsSpan, ...] = ()
    """Which weights computed the output; empty if only those did that the workers were started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The one terminal answer of an accepted request. Exactly one of `reason` and `failure` is set."""

    stream: int
    reason: EndReason | None
    failure: Failure | None
    stop_token_id: int | None
    stats: Stats


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
