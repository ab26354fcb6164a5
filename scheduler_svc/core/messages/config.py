"""The core's settings: limits, timeouts and scheduling policy, with their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum

MAX_NUM_SAMPLES = 64
"""Largest `num_samples` of a submitted request. Each sample is queued and runs as a request of its own."""
MAX_LOGPROBS = 20
"""Largest number of alternative tokens that a caller may get beside each token's logprob."""
MAX_LANES = 64
"""Largest number of workers that serve at the same time."""


class Admission(StrEnum):
    """The headroom rule: pages that must stay free when a request is admitted, beyond the pages for its own tokens."""

    HORIZON = "horizon"
    """The larger of two figures: the pages that the running rows take over the next few steps, counted exactly, and an
    estimate of the pages that they take until they end."""
    WATERMARK = "watermark"
    """One hundredth of the pool."""
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
    """Each tenant gets an equal share of the service. If False, all requests count as one tenant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The core's settings. Seconds are those of the `now` that `Scheduler.handle` gets."""

    max_waiting: int = 1024
    """Largest number of requests in the queue, each sample counted."""
    max_waiting_tokens: int = 4_194_304
    """Largest number of prompt and output tokens of the requests in the queue."""
    plans_in_flight: int = 2
    """Largest number of plans per lane that are sent and not yet answered."""
    step_timeout_seconds: float = 120.0
    """A worker that does not answer a plan for this long is lost."""
    silence_timeout_seconds: float = 15.0
    """A worker without a plan in flight that sends no message for this long is lost."""
    max_worker_wait_seconds: float = 600.0
    """How long a request waits while no present worker can hold it."""
    max_plan_bytes: int = 16 << 20
    """Encoded size from which on a plan starts no further row. Every plan may start one row of any size."""
    prove_workers: bool = False
    """Whether a new worker must confirm a step before requests run on it and callers learn its limits."""
    report_steps: bool = False
    """Whether the core emits a StepReport for every step, every lane reset and every worker that joins."""
    policy: Policy = field(default_factory=Policy)
