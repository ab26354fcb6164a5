"""The outputs of the core: one class per effect that `Scheduler.handle` returns, as plain data.

The shell carries out each effect in order. The tokens of a step form one StepOutput per front end, as arrays, because
at 1,024 rows an object per row would cost more time than the step itself.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Float32Array, Int32Array
from scheduler_svc.core.messages.ends import Detached, Forgotten, Replaced, Resumed
from scheduler_svc.core.messages.ends import End as End
from scheduler_svc.core.messages.ends import EndReason as EndReason
from scheduler_svc.core.messages.ends import Failure as Failure
from scheduler_svc.core.messages.ends import FailureCode as FailureCode
from scheduler_svc.core.messages.ends import Stats as Stats
from scheduler_svc.core.messages.operators import QuarantineReply
from scheduler_svc.core.messages.reports import DrainReport, Load, StepReport, WeightsReport
from scheduler_svc.core.messages.waits import Wait as Wait
from scheduler_svc.core.messages.waits import WaitReason
from scheduler_svc.core.messages.waits import Waits as Waits
from scheduler_svc.core.messages.worker_effects import (
    AskRejoin,
    DismissWorker,
    DropConstraint,
    KillWorker,
    LoadWeights,
    PrepareConstraint,
    SendPlan,
    WeightsChanged,
    WorkerAccepted,
    WorkerProven,
    WorkerRefused,
)
from scheduler_svc.core.messages.worker_info import WorkerInfo


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
    streams: npt.NDArray[np.uint64]
    """uint64[n]: the stream of each token."""
    offsets: Int32Array
    """int32[n]: the number of the stream's output tokens before this one."""
    tokens: Int32Array
    """int32[n]."""
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[PromptLogprobs, ...]
    ends: tuple[End, ...]
    weights_version: str = ""
    """Of the weights that computed the tokens; empty for those that workers are started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReply:
    """The answer to an Abort: each id in the order of the event, and whether it was live."""

    frontend: str
    query: int
    outcomes: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReply:
    """The answer to a LoadQuery."""

    frontend: str
    query: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReply:
    """The answer to a FlushCache. `pages` counts the pages that were cached, on devices and in host memory."""

    frontend: str
    query: int
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

    So front ends tell their callers, and refuse a request before they parse it.
    """

    frontend: str
    queue_full: str
    """One sentence while the queue is full, otherwise empty."""
    not_serving: str
    """One sentence while a request that arrives is not computed (`availability`), otherwise empty."""
    reason: WaitReason | None
    """Of `not_serving`; None while it is empty."""
    not_serving_seconds: float
    """For how long no request has been computed."""
    refuses: bool
    """Whether new requests are refused for `not_serving`. Otherwise they wait."""
    workers: int
    """Number of workers that take requests."""
    retry_seconds: float
    """In how many seconds a full queue will have emptied, as the core estimated when it sent this; 0 if not full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDrain:
    """The core rejects all new requests from now on, because the service shuts down."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRefused:
    """A Drain does not begin. This is the only answer."""

    frontend: str
    query: int
    code: RejectCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRefused:
    """An UpdateWeights does not begin. This is the only answer."""

    frontend: str
    query: int
    code: RejectCode
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the operator's log."""

    message: str


Effect = (
    Admitted
    | Rejected
    | StepOutput
    | Waits
    | AbortReply
    | LoadReply
    | FlushReply
    | QuarantineReply
    | ModelServed
    | CoreStatus
    | WorkerAccepted
    | WorkerProven
    | WorkerRefused
    | AskRejoin
    | DismissWorker
    | KillWorker
    | SendPlan
    | PrepareConstraint
    | DropConstraint
    | LoadWeights
    | WeightsChanged
    | WeightsReport
    | UpdateRefused
    | AnnounceDrain
    | DrainReport
    | DrainRefused
    | Note
    | StepReport
    | Resumed
    | Replaced
    | Detached
    | Forgotten
)
