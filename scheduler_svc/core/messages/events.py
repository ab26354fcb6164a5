"""The inputs of the core: one class per event that `Scheduler.handle` takes, as plain data.

The names of front ends and workers (`frontend`, `worker`) are opaque strings. The shell checks the sizes and ranges of
all fields before it makes an event. The core checks what depends on its state: duplicate ids, queue limits, pool size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from scheduler_svc.core.messages.arrays import NO_FLOATS, NO_IDS, Float32Array, Int32Array
from scheduler_svc.core.messages.config import MAX_LOGPROBS
from scheduler_svc.core.messages.effects import End, WeightsSpan
from scheduler_svc.core.messages.operators import (
    MAX_DETAIL_CHARS,
    ClearQuarantine,
    Drain,
    DrainEnded,
    DrainStarted,
    QuarantineQuery,
    QuarantineRestored,
    RequestsQuery,
    TenantsChanged,
    UpdateWeights,
    WeightsLoaded,
    WeightsRestored,
)
from scheduler_svc.core.messages.plan import KeptPages
from scheduler_svc.core.messages.reports import Exchange
from scheduler_svc.core.messages.resources import CONSTRAINT, RESOURCE_HASH_BYTES, Resource
from scheduler_svc.core.messages.worker_info import MAX_POOL_BYTES, WorkerInfo
from tandem_contract.bounds import Cut, Length, Range

# The largest `Submit.sampling`: the lists of tokens that a front end takes make 94 kB at most.
MAX_SAMPLING_BYTES = 96 << 10
# The largest `Submit.description`: stop strings and stop tokens make 20 kB at most.
MAX_DESCRIPTION_BYTES = 32 << 10
SECRET_HASH_BYTES = 32
# No number of a prompt or an output is larger, so that sums of them fit in 32 bits.
MAX_TOKENS = (1 << 30) - 1
EXPECTED_TOKENS = 256
"""The tokens that are still expected of a sample without a maximum: most answers are shorter, and the rest of a
context of 131,072 tokens would leave pages idle and let one request take the tokens of a tenant's minute."""
Seconds = Annotated[float, Range(0, 1e12)]

# Sampling, stop tokens in any order, limits.
Options = tuple[bytes, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit:
    """A validated request. Its samples use the streams `stream` to `stream + num_samples - 1`, one each."""

    frontend: str
    stream: int
    request_id: str
    prompt: Annotated[Int32Array, Length(1)]
    """int32[n], n at least 1."""
    sampling: Annotated[bytes, Length(0, MAX_SAMPLING_BYTES)]
    """A serialized SamplingParams. The core passes it to the worker and does not parse it."""
    max_new_tokens: Annotated[int, Range(1, MAX_TOKENS)]
    min_new_tokens: Annotated[int, Range(0, MAX_TOKENS)] = 0
    stop_token_ids: Annotated[tuple[int, ...], Length(0, 1024)] = ()
    ignore_eos: bool = False
    priority: int = 0
    """Requests of a higher priority go first (`queue/turns.queue_key`)."""
    max_time_seconds: Seconds = 0.0
    """Time from this event after which the request ends with TIME_LIMIT. 0 for no limit."""
    deadline_seconds: Seconds = 0.0
    """Time from this event after which the request fails with DEADLINE. 0 for no deadline."""
    max_queue_seconds: Seconds = 0.0
    """Time from this event after which the request fails with DEADLINE if it has had no row. 0 for no limit."""
    num_samples: Annotated[int, Range(1, 1024)] = 1
    num_logprobs: Annotated[int, Range(0, 1 + MAX_LOGPROBS)] = 0
    """0 for none, otherwise 1 + the number of alternatives for each output token."""
    prompt_logprobs_from: Annotated[int, Range(0, MAX_TOKENS)] = 0
    """The first stream gets prompt logprobs from this position on. 0 for none."""
    prefix_root: bytes = b""
    """32 bytes: the start of the request's page hashes (`page_hash`), made of its tenant and salt. If it is empty, the
    request shares no pages."""
    page_hashes: bytes = b""
    """32 bytes for each full page of the prompt, as far as the front end computed them."""
    cache_read: bool = True
    """Whether the request may use cached pages."""
    cache_write: bool = True
    """Whether the request's pages enter the prefix cache."""
    linger_seconds: Seconds = 0.0
    """How long the request goes on without a reader, and its answer is kept after its end. 0: it ends with its
    reader."""
    secret_hash: bytes = b""
    """SHA-256 of the secret that resumes the request: 32 bytes. Empty if `linger_seconds` is 0."""
    description: Annotated[bytes, Length(0, MAX_DESCRIPTION_BYTES)] = b""
    """Bytes that the core keeps unread for the front end that resumes the request."""
    tenant: str = ""
    """The tenant that the request counts for; empty without a token file."""
    traceparent: Annotated[str, Length(0, 55)] = ""
    """The caller's trace, for the flight recorder; the core does not read it."""
    resources: tuple[Resource, ...] = ()
    """What a worker must prepare for the request, at most one of each kind."""
    sampling_key: bytes = b""
    """Hash of `sampling` without the seed, which may be drawn again each time. If it is empty, `sampling` counts."""
    is_max_unset: bool = False
    """Whether the caller left the maximum unset. `max_new_tokens` is then what the front end allows, and no demand: a
    worker with less room takes the request, which ends where the room of every worker ends."""

    def expected(self, most: int) -> int:
        """Returns how many output tokens of a sample are expected where at most `most` can come."""
        return min(most, EXPECTED_TOKENS) if self.is_max_unset else most

    @property
    def options(self) -> Options:
        """What identifies the request besides tenant and prompt: sampling and resources, stop tokens, limits."""
        # An unset maximum depends on the workers.
        most = 0 if self.is_max_unset else self.max_new_tokens
        limits = (self.ignore_eos, most, self.min_new_tokens, self.num_logprobs)
        keys = b"".join(resource.key for resource in self.resources)
        return (self.sampling_key or self.sampling) + keys, self.stop_token_ids, limits

    @property
    def lingers(self) -> bool:
        """Whether the request may be resumed (`kept_requests`), so that it outlives its reader."""
        return self.linger_seconds > 0

    def ends_at(self, arrived_at: float) -> float | None:
        """Returns the earlier end of time limit and deadline, by the clock of `arrived_at`; None without one."""
        limits = [seconds for seconds in (self.max_time_seconds, self.deadline_seconds) if seconds > 0]
        return arrived_at + min(limits) if limits else None

    @property
    def streams(self) -> range:
        """The streams of the request, one per sample."""
        return range(self.stream, self.stream + self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A front end asks to become the reader of a request that lingers. The answer is Resumed or Rejected.

    The samples get the streams from `stream` on.
    """

    frontend: str
    stream: int
    request_id: str
    secret_hash: Annotated[bytes, Length(SECRET_HASH_BYTES, SECRET_HASH_BYTES)]
    others: tuple[str, ...] = ()
    """Other ids that the caller may mean (`names.meant`), the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """A request that lingers, from the journal of an earlier process. It has no reader until it is resumed.

    It comes before the first worker joins. The core queues it when the first worker has been proven.
    """

    submit: Submit
    """As it came, but with an empty `frontend`. `stream` has no meaning."""
    outputs: tuple[Int32Array, ...]
    """The output tokens of each sample, as far as the journal has them."""
    ends: tuple[End | None, ...]
    """The end of each sample, None if it has not ended."""
    linger_seconds: float
    """Seconds from this event until the request is dropped if its caller does not resume it."""
    weights: tuple[tuple[WeightsSpan, ...], ...] = ()
    """The spans by weights of each sample's output; empty: those that workers are started with."""
    suspects: tuple[int, ...] = ()
    """Indices of the samples that may have killed a worker."""
    identity: str = ""
    """Identity of the model that computed the outputs; empty if no worker had been proven. The request fails if another
    model is served."""
    age_seconds: float = 0.0
    """Time from the request's arrival to this event, which counts for its time limit and its deadline."""


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
class Abort(Exchange):
    """A caller asks to end the live requests with these ids. `query` identifies the AbortReply."""

    request_ids: tuple[str, ...]
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By id: other ids that the caller may mean (`names.meant`), the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadQuery(Exchange):
    """A front end asks for the core's load. `query` identifies the LoadReply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache(Exchange):
    """A caller asks to empty the prefix cache, also in host memory. `query` identifies the FlushReply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendJoined:
    """A front end connected. If the core knows it already, it has restarted, so the core frees its old requests."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLost:
    """A front end is gone, so the core frees its requests. `is_orderly` is True if it announced its stop."""

    frontend: str
    is_orderly: bool = False


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
class WorkerStops:
    """A worker was asked to stop, and computes until it is dismissed."""

    worker: str


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
    """Logprobs of m tokens as a worker sent them. Lengths and values are not checked yet (`results.is_valid`)."""

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
    """The rows of a step with complete or failed constraints. Indices are into `StepDone.tokens`."""

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
    pool_id: Annotated[bytes, Length(0, MAX_POOL_BYTES)] = b""
    """If the plan had a `take_over`: the pool that the worker uses now."""
    damaged_pages: int = 0
    """Pages of a pool that was taken over that the step found damaged."""
    constraints: ConstraintsOfStep | None = None
    """None if no constraint was complete and none failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceReady:
    """A worker has prepared a resource, or cannot."""

    worker: str
    hash: Annotated[bytes, Length(RESOURCE_HASH_BYTES, RESOURCE_HASH_BYTES)]
    error: Annotated[str, Cut(MAX_DETAIL_CHARS)] = ""
    """Why the resource cannot be used, in one sentence; empty if it can."""
    kind: str = CONSTRAINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The shell has passed on all pending events. The core checks deadlines, then makes plans (on this event only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The scheduler did not run for `seconds`, for example because its machine was frozen. It heard no worker then."""

    seconds: float


FromCallers = Submit | Resume | Cancel | Finish | Abort
FromOperators = LoadQuery | FlushCache | QuarantineQuery | ClearQuarantine | RequestsQuery | Drain | UpdateWeights
FromWorkers = WorkerJoined | WorkerLost | WorkerStops | WorkerAlive | StepDone | ResourceReady | WeightsLoaded
FromJournal = Restored | QuarantineRestored | WeightsRestored
"""What an earlier process left in the journal."""
FromShell = FrontendJoined | FrontendLost | TenantsChanged | Tick | Paused | DrainStarted | DrainEnded
Event = FromCallers | FromOperators | FromWorkers | FromJournal | FromShell
