"""Reports of the core: its load, the outcome of each step, the progress of operations, and why requests wait."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A query of a front end to the core, or an answer to it, which has the same number."""

    frontend: str
    query: int


class WaitReason(StrEnum):
    """Why no request can be computed now (the first nine), or why one request waits. Names as in inference.proto."""

    NO_WORKER = "no worker"
    WORKER_LOST = "worker lost"
    WORKER_STARTING = "worker starting"
    ON_STANDBY = "on standby"
    LOADING_WEIGHTS = "loading weights"
    WEIGHTS_REFUSED = "weights refused"
    WORKERS_LEAVING = "workers leaving"
    CRASH_LOOP = "crash loop"
    SHUTTING_DOWN = "shutting down"
    NO_LARGE_WORKER = "no large worker"
    SUSPECT = "suspect"
    CONSTRAINT = "constraint"
    TENANT_SHARE = "tenant share"
    PREEMPTED = "preempted"
    QUEUE = "queue"
    SLOW_STEP = "slow step"
    COMPUTING = "computing"
    """The request has a row again, and no token since its caller heard that it waits."""


SERVICE_REASONS = tuple(WaitReason)[:9]
"""Those that hold for every request that arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotServing:
    """Why a request that arrives now cannot be computed."""

    reason: WaitReason
    message: str
    """One sentence without numbers that change with time."""
    since: float
    """Time on the core's clock [s] since when no request can be computed, for any reason."""


class WorkerState(StrEnum):
    """What a worker that has joined does."""

    SERVING = "serving"
    STANDBY = "standby"
    STARTING = "starting"
    """Its first step is not confirmed."""
    LOADING = "loading"
    """It loads the service's weights, or does so when its requests have ended."""
    REFUSED = "refused"
    """It cannot load them."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load of one worker. `pages_cached` is as in Load, `device` is a human-readable description."""

    pid: int
    device: str
    running: int
    pages_used: int
    pages_cached: int
    pages_total: int
    is_standby: bool
    """Whether the worker waits without requests until a serving worker is lost."""
    name: str = ""
    is_draining: bool = False
    weights_version: str = ""
    state: WorkerState = WorkerState.SERVING
    detail: str = ""
    """What is wrong, in the worker's own words, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """Hung workers, and what followed steps that ran out of memory (`memory_limit.Reduction`)."""

    hung_workers: int = 0
    smaller_steps: int = 0
    fewer_rows: int = 0
    alone: int = 0
    ended_for_memory: int = 0
    workers_refused_for_memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPoolsLoad:
    """The page pools with memory that outlives their workers (`held_pools`)."""

    pools: int = 0
    """Those of lost workers that no lane has taken over yet."""
    pages: int = 0
    """Their cached pages."""
    bytes: int = 0
    """The size of their memory."""
    taken_over: int = 0
    """Pools that workers have taken over since the start."""
    pages_kept: int = 0
    """The cached pages in them."""
    damaged_pages: int = 0
    """Pages in them that were found damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of the core. Counters start at 0 with the core.

    `workers` are those that take requests. The sums of pages leave out those on standby, which `per_worker` lists last.
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    workers: int
    steps: int
    """Confirmed steps."""
    step_ms: float
    """Median time between a plan and its result, over the last 64 steps."""
    preemptions: int
    lane_resets: int
    output_tokens: int
    worker_pid: int
    """Process id of the worker that joined first, or 0."""
    pages_cached: int
    """Cached pages without a reference from a row. Used pages may be cached too, but do not count here."""
    prompt_tokens: int
    """Prompt tokens of all requests that have had a row."""
    cached_prompt_tokens: int
    """Number of `prompt_tokens` that were found in the prefix cache."""
    host_pages_used: int
    host_pages_total: int
    per_worker: tuple[WorkerLoad, ...]
    worker_lost_seconds: float | None
    """Time since a worker was last lost. None if none was."""
    worker_lost_reason: str
    suspects: int
    """Requests that may have killed a worker or made a step fail."""
    standby_workers: int
    """Those that could take over at once."""
    incidents: Incidents
    held_pools: HeldPoolsLoad
    journal_bytes: int = 0
    """Size of the journal, 0 without one. The shell sets this and the next field."""
    weights_version: str = ""
    """The version of the last update of weights; empty without one."""
    journal_suspended: str = ""
    """Why the journal cannot be written at the moment, otherwise empty."""


class RequestState(StrEnum):
    """Where a sample of a request is."""

    WAITING = "waiting"
    """It has no row."""
    RUNNING = "running"
    KEPT = "kept"
    """It has ended, and its answer is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEntry:
    """One sample in the list of requests. The fields are those of RequestEntry in control.proto."""

    request_id: str
    """As its caller knows it."""
    tenant: str
    state: RequestState
    wait_reason: WaitReason | None = None
    """Why it makes no progress; None while it does."""
    wait_message: str = ""
    age_seconds: float
    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int = 0
    priority: int = 0
    sample_idx: int
    num_samples: int
    worker: str = ""
    weights_version: str = ""
    is_detached: bool
    seconds_left: float | None
    """None without a limit."""


class OperationState(StrEnum):
    """The state of what an operator has started."""

    @property
    def is_final(self) -> bool:
        return self.name not in ("DRAINING", "LEAVING", "UPDATING")


class DrainState(OperationState):
    """The state of a drain; all but the first two are final."""

    DRAINING = "draining"
    LEAVING = "leaving"
    DONE = "done"
    TIME_LIMIT = "time limit"
    WORKER_LOST = "worker lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport(Exchange):
    """The progress of a drain, for one operator. The fields are those of DrainResponse in control.proto."""

    worker: str
    state: DrainState
    running: int
    waiting: int
    worker_running: int
    tokens_left: int
    moved: int
    seconds: float
    detail: str


class UpdateState(OperationState):
    """The state of an update of weights; all but the first are final."""

    UPDATING = "updating"
    DONE = "done"
    REFUSED = "refused"
    TIME_LIMIT = "time limit"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport(Exchange):
    """The progress of an update, for one operator. The fields are those of UpdateWeightsResponse in control.proto."""

    version: str
    state: UpdateState
    workers: int
    workers_updated: int
    running: int
    waiting: int
    seconds: float
    detail: str


class StepKind(StrEnum):
    """What a StepReport reports: the type of a step, a lane reset, or a worker that joined or was seated."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    RESET = "reset"
    JOINED = "joined"


class ResetCause(StrEnum):
    """Why a lane was reset."""

    WORKER_LOST = "worker lost"
    WORKER_SILENT = "worker silent"
    STEP_FAILED = "step failed"
    OUT_OF_MEMORY = "out of memory"
    OUT_OF_SYNC = "out of sync"
    SKIPPED = "skipped"
    MALFORMED = "malformed result"
    WRONG_STEP = "wrong step"
    DRAINED = "drained"
    NEW_WEIGHTS = "new weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A confirmed step, a lane reset, or a worker that joined. A standby worker joins when it is seated.

    `step` and `preemptions` are counts since the core's start, as in Load. `prefill_tokens` counts the positions in
    chunks, `decode_tokens` the decode rows, `output_tokens` the delivered tokens. `at` is on the core's clock,
    `span_seconds` the time between the plan and its result. The report of a reset has a `cause`, and its token counts
    and span are those of the void plans. Resets and joins repeat the last step's number.

    `lane` is the lane's number. A worker that joins again gets a new lane. `running` and `pages_*` are values of this
    lane. `all_running` and `all_pages_*` are sums over the lanes of all `workers`, without one that the reset removes.
    """

    kind: StepKind
    cause: ResetCause | None
    at: float
    step: int
    lane: int
    generation: int
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    pages_used: int
    pages_cached: int
    pages_total: int
    preemptions: int
    compute_us: int
    span_seconds: float
    workers: int
    all_running: int
    all_pages_used: int
    all_pages_cached: int
    all_pages_total: int
