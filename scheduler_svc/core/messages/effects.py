"""What the core wants done: every output of `Scheduler.handle`, as plain data.

Owns nothing. The loop carries each effect out and never asks the core why. A step's tokens travel as one effect per
front end, in arrays: at 1,024 rows an object per row costs more than the whole step.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Float32Array, Int32Array
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.messages.reports import Load, StepReport
from scheduler_svc.core.messages.worker_info import WorkerInfo


class RejectCode(StrEnum):
    """Why a request was not admitted."""

    INVALID = "invalid"
    DUPLICATE = "duplicate"
    QUEUE_FULL = "queue full"
    NOT_READY = "not ready"


class EndReason(StrEnum):
    """Why an admitted request ended in good order."""

    EOS = "eos"
    STOP_TOKEN = "stop token"
    STOP_STRING = "stop string"
    LENGTH = "length"
    TIME_LIMIT = "time limit"
    ABORTED = "aborted"
    CONTEXT_FULL = "context full"


class FailureCode(StrEnum):
    """Why an admitted request could not go on."""

    INTERNAL = "internal"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    NO_WORKER = "no worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error instead of a reason, one sentence."""

    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A request's account: tokens, and seconds of the core's clock."""

    prompt_tokens: int
    output_tokens: int
    discarded_tokens: int
    recomputed_tokens: int
    cached_prompt_tokens: int
    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    worker_changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The one terminal answer of an admitted request: exactly one of `reason` and `failure` is set."""

    stream: int
    reason: EndReason | None
    failure: Failure | None
    stop_token_id: int | None
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request waits, all its samples, behind `requests_ahead` others; `stream` is the first."""

    frontend: str
    stream: int
    requests_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The request's terminal answer for all its samples, before they were admitted; `stream` is the first."""

    frontend: str
    stream: int
    code: RejectCode
    message: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logprobs:
    """`logprobs` float32[m] of the tokens themselves; `top_token_ids` int32[m, k] and `top_logprobs` float32[m, k]."""

    logprobs: Float32Array
    top_token_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Of some entries of a StepOutput, `entries` int32[m], ascending. Who wants fewer than k has the first ones."""

    entries: Int32Array
    values: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Of the stream's prompt tokens from `start` on: one piece, which the next one follows on."""

    frontend: str
    stream: int
    start: int
    values: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """Prompt logprobs and tokens of one step for one front end, one token per entry, then those who ended.

    `streams` uint64[n], `offsets` int32[n] (output tokens before this one), `tokens` int32[n].
    """

    frontend: str
    streams: npt.NDArray[np.uint64]
    offsets: Int32Array
    tokens: Int32Array
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[PromptLogprobs, ...]
    ends: tuple[End, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReply:
    """Per id, in the order asked: was it live?"""

    frontend: str
    query: int
    outcomes: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReply:
    """Answer to a LoadQuery."""

    frontend: str
    query: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReply:
    """Answer to a FlushCache: pages that were kept, on devices and in host memory."""

    frontend: str
    query: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServed:
    """What callers of this front end may wanted for; `info` is None until a worker is proven.

    `recent_max_length`: the longest sequence of a worker that is present or left less than `max_worker_wait_seconds`
    ago.
    """

    frontend: str
    info: WorkerInfo | None
    recent_max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStatus:
    """What this front end needs to know before it spends work on a request.

    `queue_full` is a sentence while no request can be queued, `not_serving` one while the core does not serve; both are
    empty otherwise. `workers` have joined.
    """

    frontend: str
    queue_full: str
    not_serving: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccepted:
    """The worker serves from now on; plans of `generation` follow."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProven:
    """The worker has confirmed a step, or need not: its sizes reach callers and it gets requests."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """The worker may not serve; with `retry` it may ask again."""

    worker: str
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRejoin:
    """The worker is not known (any more) and should join again."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """Send this plan to this worker."""

    worker: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDrain:
    """Tell this front end that nobody is admitted any more."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the log: something an operator wants to know."""

    message: str


Effect = (
    Admitted
    | Rejected
    | StepOutput
    | AbortReply
    | LoadReply
    | FlushReply
    | ModelServed
    | CoreStatus
    | WorkerAccepted
    | WorkerProven
    | WorkerRefused
    | AskRejoin
    | SendPlan
    | AnnounceDrain
    | Note
    | StepReport
)
