"""The outputs of the core: one class per effect that `Scheduler.handle` returns, as plain data.

The shell carries out each effect in order. The tokens of a step form one StepOutput per front end, as arrays, because
at 1,024 rows an object per row would cost more time than the step itself.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_IDS, NO_STREAMS, Float32Array, Int32Array
from scheduler_svc.core.messages.operators import QuarantineReply, RequestsReply, Weights
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.messages.reports import DrainReport, Exchange, Load, StepReport, WaitReason, WeightsReport
from scheduler_svc.core.messages.resources import DropResource, PrepareResource
from scheduler_svc.core.messages.worker_info import WorkerInfo


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccepted:
    """The worker has joined and has a lane. The lane's plans carry `generation`."""

    worker: str
    generation: int
    page_root: str = ""
    """`CoreConfig.page_root`."""
    keeps_pages: bool = False
    """Whether the pages that the worker has kept stay as they are. Otherwise it zeroes its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProven:
    """Requests may run on the worker and callers see its limits: a step succeeded, or it was on standby until now."""

    worker: str
    was_standby: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """The worker may not serve. If `retry` is True, it may join again later."""

    worker: str
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRejoin:
    """The core has no lane for this worker, so the worker should join again."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissWorker:
    """The worker was drained: it has no request, and ends."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """The worker hangs. It is killed if the program that started this service started the worker, too."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """The next plan for a worker."""

    worker: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """The worker, which has no plan in flight, is to load these weights."""

    worker: str
    weights: Weights
    roots: tuple[str, ...]
    """`CoreConfig.weights_folders`."""
    keep_rows: bool = False
    """Rows and pages stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChanged:
    """A worker has loaded new weights, which are now those of the service. Only the journal reads this."""

    weights: Weights


class RejectCode(StrEnum):
    """Why a request was rejected on arrival."""

    INVALID = "invalid"
    DUPLICATE = "duplicate"
    QUEUE_FULL = "queue full"
    NOT_READY = "not ready"
    QUARANTINED = "quarantined"
    RATE_LIMITED = "rate limited"
    NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The core queued a request. `stream` is the first sample's; `requests_ahead` others were waiting already."""

    frontend: str
    stream: int
    requests_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The core rejected a request. This is the only answer, for all samples. `stream` is the first sample's."""

    frontend: str
    stream: int
    code: RejectCode
    message: str
    field: str
    retry_seconds: float = 0.0
    """When the request may be accepted if it is sent again; 0 if the core does not know."""
    tenant_is_full: bool = False
    """Whether any other request of the tenant would be refused too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logprobs:
    """Logprobs of m tokens, each with the k most probable tokens at its position."""

    logprobs: Float32Array
    """float32[m]: the logprob of each token."""
    top_token_ids: Int32Array
    """int32[m, k], most probable first."""
    top_logprobs: Float32Array
    """float32[m, k]: their logprobs."""

    def at(self, lines: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice, top_k: int | None = None) -> "Logprobs":
        """Returns those of some tokens, with at most `top_k` alternatives."""
        return Logprobs(
            logprobs=self.logprobs[lines],
            top_token_ids=self.top_token_ids[lines, :top_k],
            top_logprobs=self.top_logprobs[lines, :top_k],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Logprobs of those entries of a StepOutput for which logprobs were requested. `entries` int32[m] is ascending.

    k is the largest number of alternatives requested for an entry. An entry with fewer uses the first ones.
    """

    entries: Int32Array
    values: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Logprobs of a stream's prompt tokens from position `start` on. The pieces of a prompt arrive in order."""

    frontend: str
    stream: int
    start: int
    values: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """What one step produced for the streams of one front end: prompt logprobs, then n tokens, then ends."""

    frontend: str
    streams: npt.NDArray[np.uint64] = field(default_factory=lambda: NO_STREAMS)
    """uint64[n]: the stream of each token."""
    offsets: Int32Array = field(default_factory=lambda: NO_IDS)
    """int32[n]: the number of the stream's output tokens before this one."""
    tokens: Int32Array = field(default_factory=lambda: NO_IDS)
    """int32[n]."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    ends: tuple[End, ...] = ()
    weights_version: str = ""
    """The version of the weights that computed the tokens; empty for those that workers are started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Requests that make no progress for the same reason."""

    reason: WaitReason
    message: str
    """One sentence."""
    streams: tuple[int, ...]
    seconds: tuple[float, ...]
    """For how long each has waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Reasons to wait that one front end passes on to its callers."""

    frontend: str
    waits: tuple[Wait, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReply(Exchange):
    """The answer to an Abort: each id in the order of the event, and whether it was live."""

    outcomes: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReply(Exchange):
    """The answer to a LoadQuery."""

    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReply(Exchange):
    """The answer to a FlushCache. `pages` counts the pages that were cached, on devices and in host memory."""

    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServed:
    """The model and limits that a front end publishes. The core sends them when it joins and after each change."""

    frontend: str
    info: WorkerInfo | None
    """The largest present worker, or the last one if none is present. None until a worker is proven."""
    recent_max_length: int
    """Largest `max_length` of `info` and of the workers that left less than `max_worker_wait_seconds` ago."""
    constraint_refusal: str = ""
    """Why constraints are refused; empty if a known worker takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStatus:
    """Whether requests are computed, and whether the core accepts them.

    Front ends inform their callers, and can refuse a request before they parse it.
    """

    frontend: str
    queue_full: str
    """One sentence while the queue is full, otherwise empty."""
    not_serving: str
    """One sentence while a request that arrives is not computed (`status.Availability`), otherwise empty."""
    reason: WaitReason | None
    """The reason for `not_serving`; None while that is empty."""
    not_serving_seconds: float
    """For how long no request has been computed."""
    refuses: bool
    """Whether new requests are refused for `not_serving`. Otherwise they wait."""
    workers: int
    """Number of workers that take requests."""
    retry_seconds: float
    """In how many seconds a full queue will have emptied, as the core estimated when it sent this; 0 if not full."""
    places: int = 0
    """How many requests front ends let in until they hear more, after the queue was full; 0 if they count none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDrain:
    """The core rejects all new requests from now on, because the service shuts down."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRefused(Exchange):
    """What an operator asks for does not begin. This is the only answer."""

    code: RejectCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRefused(OperationRefused):
    """A Drain does not begin."""

    field: ClassVar[str] = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRefused(OperationRefused):
    """An UpdateWeights does not begin. `field` is the one at fault, or empty."""

    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the operator's log about something that went wrong."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A line for the operator's log about something that goes as it should."""

    message: str


ToCallers = Admitted | Rejected | StepOutput | Waits | Resumed | Replaced
"""What a front end passes on to the caller of a request."""
ToOperators = AbortReply | LoadReply | FlushReply | QuarantineReply | RequestsReply
Progress = DrainReport | DrainRefused | WeightsReport | UpdateRefused
"""Reports of operations, for the operators that watch them."""
ToFrontends = ModelServed | CoreStatus | AnnounceDrain
ToWorkers = WorkerAccepted | WorkerRefused | AskRejoin | DismissWorker | SendPlan | LoadWeights
ToPrepare = PrepareResource | DropResource
ToShell = WorkerProven | KillWorker | WeightsChanged | Note | News | StepReport | Detached | Forgotten
"""What the shell carries out, logs, or keeps in its journal."""
Effect = ToCallers | ToOperators | Progress | ToFrontends | ToWorkers | ToPrepare | ToShell
