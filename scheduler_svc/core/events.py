"""What can happen to the core: every input of `Scheduler.handle`, as plain data.

Owns nothing. Knows nothing of sockets, protobuf or the clock; `peer` names are opaque. Sizes and ranges of the fields
were checked by whoever made the event; what only the core can know (duplicates, bounds, the pool) it checks itself.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are drawn. The core only carries it to the worker."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit:
    """A validated request. `prompt` is int32[at least 1]; seconds count from this event, 0 is none."""

    frontend: str
    stream: int
    request_id: str
    prompt: Int32Array
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    priority: int
    max_time_seconds: float
    deadline_seconds: float


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
class FrontendJoined:
    """A front end says hello; if it is known, it starts anew and its requests are freed."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLost:
    """A front end is gone; nobody listens to its streams."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker serves. Pages are numbered 0 to num_pages - 1, page 0 and row 0 are reserved."""

    identity: str
    model: str
    vocab_size: int
    page_size: int
    num_pages: int
    max_rows: int
    max_length: int
    token_budget: int
    chunk_align: int
    logit_rows: int
    eos_token_ids: tuple[int, ...]
    pid: int

    @property
    def usable_pages(self) -> int:
        """Pages that requests may hold."""
        return self.num_pages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker offers itself, for the first time or again."""

    worker: str
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone."""

    worker: str
    reason: str


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
class StepDone:
    """A step's result: `tokens` int32, one per sampled row in the plan's order; `nonfinite` indices into them.

    `compute_us` is the worker's own time for the step.
    """

    worker: str
    generation: int
    step: int
    status: StepStatus
    detail: str
    tokens: Int32Array
    nonfinite: Int32Array
    compute_us: int


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
