"""The inputs of the core: one class per event that `Scheduler.handle` takes, as plain data.

The names of front ends and workers (`frontend`, `worker`) are opaque strings. The shell checks the sizes and ranges of
all fields before it makes an event. The core checks what depends on its state: duplicate ids, queue limits, pool size.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler_svc.core.messages.arrays import NO_FLOATS, NO_IDS, Float32Array, Int32Array
from scheduler_svc.core.messages.quarantine import ClearQuarantine, QuarantineQuery
from scheduler_svc.core.messages.worker_info import WorkerInfo

# The largest `Submit.sampling`: the lists of tokens that a front end takes make 94 kB at most.
MAX_SAMPLING_BYTES = 96 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit:
    """A validated request. Its samples use the streams `stream` to `stream + num_samples - 1`, one each."""

    frontend: str
    stream: int
    request_id: str
    prompt: Int32Array
    """int32[n], n at least 1."""
    sampling: bytes
    """A serialized SamplingParams. The core passes it to the worker and does not parse it."""
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    priority: int
    """Requests of a higher priority go first (`request_queue.queue_key`)."""
    max_time_seconds: float
    """Time from this event after which the request ends with TIME_LIMIT. 0 for no limit."""
    deadline_seconds: float
    """Time from this event after which the request fails with DEADLINE. 0 for no deadline."""
    num_samples: int = 1
    num_logprobs: int = 0
    """0 for none, otherwise 1 + the number of alternatives for each output token."""
    prompt_logprobs_from: int = 0
    """The first stream gets prompt logprobs from this position on. 0 for none."""
    prefix_root: bytes = b""
    """32 bytes: the start of the request's page hashes (`page_hash`), which also identifies the tenant. If it is empty,
    the request shares no pages."""
    page_hashes: bytes = b""
    """32 bytes for each full page of the prompt, as far as the front end computed them."""
    cache_read: bool = True
    """Whether the request may use cached pages."""
    cache_write: bool = True
    """Whether the request's pages enter the prefix cache."""
    sampling_key: bytes = b""
    """Hash of `sampling` without the seed, which may be drawn anew each time. If it is empty, `sampling` counts."""

    @property
    def options(self) -> tuple[bytes, bytes]:
        """What identifies the request besides tenant and prompt: its sampling, its stop tokens and limits."""
        stops = sorted(set(self.stop_token_ids))
        limits = (stops, self.ignore_eos, self.max_new_tokens, self.min_new_tokens, self.num_logprobs)
        return self.sampling_key or self.sampling, repr(limits).encode()

    @property
    def streams(self) -> range:
        """The streams of the request, one per sample."""
        return range(self.stream, self.stream + self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The caller of this stream is gone, so the core frees the request and sends no answer."""

    frontend: str
    stream: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The shell has passed on all pending events. The core checks deadlines, then makes plans (on this event only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The scheduler did not run for `seconds`, for example because its machine was frozen. It heard no worker then."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """The service begins to shut down: the core rejects new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    """The shutdown's grace period is over: the core ends all live requests."""


Event = (
    Submit
    | Cancel
    | Finish
    | Abort
    | LoadQuery
    | FlushCache
    | QuarantineQuery
    | ClearQuarantine
    | FrontendJoined
    | FrontendLost
    | WorkerJoined
    | WorkerLost
    | WorkerAlive
    | StepDone
    | Tick
    | Paused
    | DrainStarted
    | DrainEnded
)
