"""The inputs of the core: one class per event that `Scheduler.handle` takes, as plain data.

The names of front ends and workers (`frontend`, `worker`) are opaque strings. The shell checks the sizes and ranges of
all fields before it makes an event. The core checks what depends on its state: duplicate ids, queue limits, pool size.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler_svc.core.messages.arrays import NO_FLOATS, NO_IDS, Float32Array, Int32Array
from scheduler_svc.core.messages.operators import ClearQuarantine, QuarantineQuery, QuarantineRestored
from scheduler_svc.core.messages.operators import Drain as Drain
from scheduler_svc.core.messages.operators import DrainEnded as DrainEnded
from scheduler_svc.core.messages.operators import DrainStarted as DrainStarted
from scheduler_svc.core.messages.operators import TenantsChanged as TenantsChanged
from scheduler_svc.core.messages.operators import UpdateWeights as UpdateWeights
from scheduler_svc.core.messages.operators import WeightsLoaded as WeightsLoaded
from scheduler_svc.core.messages.operators import WeightsRestored as WeightsRestored
from scheduler_svc.core.messages.plan import KeptPages
from scheduler_svc.core.messages.submit import Restored as Restored
from scheduler_svc.core.messages.submit import Resume as Resume
from scheduler_svc.core.messages.submit import Submit as Submit
from scheduler_svc.core.messages.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The caller of this stream is gone, so the core frees the request and sends no answer.

    If `detach` is set, `stream` is the first sample's and the event is for all samples. A request that lingers then
    goes on without a reader.
    """

    frontend: str
    stream: int
    detach: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The front end found a stop string: the stream's output ends after `output_tokens` tokens."""

    frontend: str
    stream: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A caller asks to end the live requests with these ids. `query` identifies the AbortReply."""

    frontend: str
    query: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadQuery:
    """A front end asks for the core's load. `query` identifies the LoadReply."""

    frontend: str
    query: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """A caller asks to empty the prefix cache, also in host memory. `query` identifies the FlushReply."""

    frontend: str
    query: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendJoined:
    """A front end connected. If the core knows it already, it has restarted, so the core frees its old requests."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLost:
    """A front end is gone, so the core frees its requests."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker asks to serve, for the first time or again."""

    worker: str
    info: WorkerInfo
    kept: KeptPages | None = None
    """The pages that it has kept from an earlier lane, also of another core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone. `is_orderly` is True if it announced its stop. Otherwise the loss may count as a crash."""

    worker: str
    reason: str
    is_orderly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAlive:
    """A worker sent a heartbeat."""

    worker: str
    num_in_flight: int = 0
    """Plans that it has and has not answered."""
    done: tuple[int, int] | None = None
    """Generation and step of the plan that it answered last, (0, 0) before the first. None if it does not say."""


class StepStatus(StrEnum):
    """The outcome of a step."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    OUT_OF_SYNC = "out of sync"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawLogprobs:
    """Logprobs of m tokens as a worker sent them. Lengths and values are not checked yet (`update.check_result`)."""

    logprobs: Float32Array = field(default_factory=lambda: NO_FLOATS)
    """float32[m]: the logprob of each token."""
    top_k: int = 0
    top_token_ids: Int32Array = field(default_factory=lambda: NO_IDS)
    """int32[m * top_k]: the most probable tokens at each position, most probable first."""
    top_logprobs: Float32Array = field(default_factory=lambda: NO_FLOATS)
    """float32[m * top_k]: their logprobs."""


NO_LOGPROBS = RawLogprobs()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConstraintsOfStep:
    """The rows of a step whose constraints are complete or failed. Indices are into `StepDone.tokens`."""

    complete: Int32Array = field(default_factory=lambda: NO_IDS)
    """The output satisfies the constraint with this token, and nothing can follow."""
    failed: Int32Array = field(default_factory=lambda: NO_IDS)
    """The constraint gave no mask. The tokens are meaningless."""
    detail: str = ""
    """Why the first one failed, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDone:
    """A worker's result of one plan."""

    worker: str
    generation: int
    step: int
    status: StepStatus
    detail: str
    """Human-readable reason if `status` is not OK."""
    tokens: Int32Array
    """int32[s]: one token per row that samples, in the order of `SentPlan.sampled`."""
    nonfinite: Int32Array
    """int32: indices into `tokens`. The logits of these rows were not finite, so their tokens are meaningless."""
    compute_us: int
    """Time that the worker took for the step."""
    logprobs: RawLogprobs = NO_LOGPROBS
    """One entry per row that samples and wants logprobs, in the order of `tokens`."""
    prompt_logprobs: RawLogprobs = NO_LOGPROBS
    """One entry per wanted prompt position, in the order of `SentPlan.wanted_prompt_logprobs`."""
    pool_id: bytes = b""
    """If the plan had a `take_over`: the pool that the worker uses now."""
    damaged_pages: int = 0
    """Pages of a pool that was taken over that the step found damaged."""
    constraints: ConstraintsOfStep | None = None
    """None if no constraint was complete and none failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintReady:
    """A worker has prepared a constraint, or cannot."""

    worker: str
    hash: bytes
    error: str = ""
    """Why the constraint cannot be used, in one sentence; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The shell has passed on all pending events. The core checks deadlines, then makes plans (on this event only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The scheduler did not run for `seconds`, for example because its machine was frozen. It heard no worker then."""

    seconds: float


Event = (
    Submit
    | Resume
    | Restored
    | Cancel
    | Finish
    | Abort
    | LoadQuery
    | FlushCache
    | QuarantineQuery
    | ClearQuarantine
    | QuarantineRestored
    | FrontendJoined
    | FrontendLost
    | WorkerJoined
    | WorkerLost
    | WorkerAlive
    | StepDone
    | ConstraintReady
    | TenantsChanged
    | Tick
    | Paused
    | Drain
    | DrainStarted
    | DrainEnded
    | UpdateWeights
    | WeightsLoaded
    | WeightsRestored
)
