"""The core's settings: limits, timeouts and the scheduling policy, with their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum

MAX_NUM_SAMPLES = 64
"""Largest `num_samples` of a submitted request. Each sample is queued and runs as a separate request."""
MAX_LOGPROBS = 20
"""Largest number of alternative tokens that a caller may request with each token's logprob."""
MAX_LANES = 64
"""Largest number of workers that serve at the same time."""


class Admission(StrEnum):
    """Rules for the headroom: the number of pages that must stay free after a request is admitted."""

    HORIZON = "horizon"
    """The larger of two numbers: the pages that the running rows allocate in the next few steps (exact), and those that
    they allocate until they end (estimated)."""
    WATERMARK = "watermark"
    """One percent of the pool (`policy.WATERMARK`)."""
    KNOWN = "known"
    """No headroom: a request is admitted if its known tokens fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Scheduling policies that the simulator compares. The defaults did best there (scheduler_svc/core/README.md)."""

    mixed_steps: bool = True
    """Prefill and decode share a step. If False, prefill runs first, in steps without decode rows."""
    admission: Admission = Admission.HORIZON
    cache_aware: bool = True
    """Among the requests at the head of the queue, the one with the longest cached prefix is admitted first."""
    fair_share: bool = True
    """Each salt gets an equal share of its tenant's service. If False, a tenant's requests wait in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The core's settings. Times are in seconds, on the clock of `Scheduler.handle`'s `now`."""

    max_waiting: int = 1024
    """Largest number of requests in the queue. Each sample counts."""
    max_waiting_tokens: int = 4_194_304
    """Largest number of prompt and output tokens of the requests in the queue."""
    plans_in_flight: int = 2
    """Largest number of plans in flight per lane. A plan is in flight from its sending until its result arrives."""
    step_timeout_seconds: float = 120.0
    """A worker is treated as lost if its current step takes longer than this."""
    predict_steps: bool = False
    """Whether a worker is also treated as lost if its current step takes longer than `state/step_clock.py` predicts."""
    silence_timeout_seconds: float = 3.0
    """A worker is treated as lost if it has no plan in flight and sends no message for this long."""
    max_worker_wait_seconds: float = 600.0
    """A request fails if no present worker can hold it for this long."""
    max_kept_requests: int = 1024
    """Largest number of ended requests with answers that are kept for callers that may resume them."""
    max_kept_bytes: int = 64 << 20
    """Largest size of these answers: their tokens and descriptions."""
    report_detached: bool = False
    """Whether the core emits the StepOutputs of requests without a reader (`effects.Detached`)."""
    max_plan_bytes: int = 16 << 20
    """Largest encoded size of the rows that a plan starts. A plan that starts only one row may exceed it."""
    quarantine_seconds: float = 3600.0
    """How long a request that killed its workers, or made its steps fail, is refused if it is sent again."""
    prove_workers: bool = False
    """Whether a new worker must confirm a step before requests run on it and callers learn its limits."""
    first_generation: int = 0
    """No worker has seen a generation above this one. A scheduler that continues another's journal begins there."""
    page_root: str = ""
    """Names the root of page hashes (`page_hash.root_name`), if workers may keep their pages for a later core that has
    the same root and continues the generations. Empty otherwise; plans then have no labels of pages."""
    weights_folders: tuple[str, ...] = ()
    """Workers may load new weights from these folders and those below them. Empty: updates are refused."""
    report_steps: bool = False
    """Whether the core emits a StepReport for every step, every lane reset and every worker that joins."""
    policy: Policy = field(default_factory=Policy)
