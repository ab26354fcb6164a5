"""Bounds, patience and policy of the core. Owns their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum

MAX_NUM_SAMPLES = 64
"""Samples that one request may ask for; each waits and runs as a request of its own."""
MAX_LOGPROBS = 20
"""Alternatives that may be told beside a token."""
MAX_LANES = 64
"""Workers that serve at once."""


class Admission(StrEnum):
    """What must be free beyond a request's own known tokens before it is admitted."""

    HORIZON = "horizon"
    """What the running will take over the next steps, exactly, or an estimate of all that they will, if it is more."""
    WATERMARK = "watermark"
    """A hundredth of the pool."""
    KNOWN = "known"
    """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Choices that the simulator compares; the defaults are what gained there (scheduler_svc/simulator/README.md)."""

    mixed_steps: bool = True
    """Prompts and decodes share a step; else prompts go first and alone."""
    admission: Admission = Admission.HORIZON
    cache_aware: bool = True
    """Among the first that wait, whoever finds most of its prompt kept goes first."""
    fair_share: bool = True
    """Tenants share the service alike; else all requests are one tenant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Bounds, patience and policy of the core. Seconds are of its clock."""

    max_waiting: int = 1024
    max_waiting_tokens: int = 4_194_304
    plans_in_flight: int = 2
    step_timeout_seconds: float = 120.0
    silence_timeout_seconds: float = 15.0
    """A worker with no plan in flight that says nothing for so long is lost."""
    max_worker_wait_seconds: float = 600.0
    """How long a request waits while no worker is there that can hold it."""
    max_plan_bytes: int = 16 << 20
    """Encoded size at which a plan starts no further row; one row is always started."""
    prove_workers: bool = False
    """Whether a worker has to confirm a step before it gets requests and before callers learn its sizes."""
    report_steps: bool = False
    """Whether a StepReport comes of every step, lane reset and worker that joins."""
    policy: Policy = field(default_factory=Policy)
