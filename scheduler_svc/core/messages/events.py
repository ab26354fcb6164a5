"""What can happen to the core: every input of `Scheduler.handle`, as plain data.

Owns nothing. Knows nothing of sockets, protobuf or the clock; `peer` names are opaque. Sizes and ranges of the fields
were checked by whoever made the event; what only the core can know (duplicates, bounds, the pool) it checks itself.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler_svc.core.messages.arrays import NO_FLOATS, NO_IDS, Float32Array, Int32Array
from scheduler_svc.core.messages.worker_info import WorkerInfo

# The largest `Submit.sampling`: the lists of tokens that a front end takes make 94 kB at most.
MAX_SAMPLING_BYTES = 96 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit:
    """A validated request. `prompt` is int32[at least 1]; seconds count from this event, 0 is none.

    Each of its samples is a stream: `stream` to `stream + num_samples - 1`. `sampling` is a serialized SamplingParams,
    which the core passes to the worker unread. `num_logprobs` is 0 for none, else 1 + the number of alternatives.
    Logprobs of the prompt's tokens from `prompt_logprobs_from` on are told on the first; 0 is none. `prefix_root` is 32
    bytes, or empty: then no page is shared; `page_hashes` are 32 bytes for each full page of the prompt
    (`page_hash.py`). Requests of one root are one tenant's.
    """

    frontend: str
    stream: int
    request_id: str
    prompt: Int32Array
    sampling: bytes
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    priority: int
    max_time_seconds: float
    deadline_seconds: float
    num_samples: int = 1
    num_logprobs: int = 0
    prompt_logprobs_from: int = 0
    prefix_root: bytes = b""
    page_hashes: bytes = b""
    cache_read: bool = True
    cache_write: bool = True

    @property
    def streams(self) -> range:
        """One per sample."""
        return range(self.stream, self.stream + self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Nobody listens to the stream any more."""

    frontend: str
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A stop string: the stream's output ends after `output_tokens` tokens."""

    frontend: str
    stream: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End the live requests among these ids."""

    frontend: str
    query: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadQuery:
    """Tell how busy the core is."""

    frontend: str
    query: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Forget every page that is kept for requests to come."""

    frontend: str
    query: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendJoined:
    """A front end says hello; if it is known, it starts anew and its requests are freed."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLost:
    """A front end is gone; nobody listens to its streams."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker offers itself, for the first time or again."""

    worker: str
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone. `is_orderly`: it said so itself, after a signal; that is not a death."""

    worker: str
    reason: str
    is_orderly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAlive:
    """A worker's heartbeat."""

    worker: str


class StepStatus(StrEnum):
    """How a step went."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    OUT_OF_SYNC = "out of sync"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawLogprobs:
    """Logprobs as a worker told them, their lengths not judged yet.

    `logprobs` float32[m] of the tokens themselves; `top_token_ids` int32[m * top_k] and `top_logprobs`
    float32[m * top_k], most probable first.
    """

    logprobs: Float32Array = field(default_factory=lambda: NO_FLOATS)
    top_k: int = 0
    top_token_ids: Int32Array = field(default_factory=lambda: NO_IDS)
    top_logprobs: Float32Array = field(default_factory=lambda: NO_FLOATS)


NO_LOGPROBS = RawLogprobs()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDone:
    """A step's result: `tokens` int32, one per sampled row in the plan's order; `nonfinite` indices into them.

    `compute_us` is the worker's own time for the step. `logprobs` are of the sampled rows that want them, in order;
    `prompt_logprobs` of the chunks' prompt positions that are wanted, chunk after chunk.
    """

    worker: str
    generation: int
    step: int
    status: StepStatus
    detail: str
    tokens: Int32Array
    nonfinite: Int32Array
    compute_us: int
    logprobs: RawLogprobs = NO_LOGPROBS
    prompt_logprobs: RawLogprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The inbox is drained: expire what is due and plan. The core plans at no other time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """Admit nobody from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    """The grace is over: end whatever lives."""


Event = (
    Submit
    | Cancel
    | Finish
    | Abort
    | LoadQuery
    | FlushCache
    | FrontendJoined
    | FrontendLost
    | WorkerJoined
    | WorkerLost
    | WorkerAlive
    | StepDone
    | Tick
    | DrainStarted
    | DrainEnded
)
