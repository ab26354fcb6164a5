"""Bounds and patience of the core. Owns their defaults."""

from dataclasses import dataclass

MAX_NUM_SAMPLES = 64
"""Samples that one request may ask for; each waits and runs as a request of its own."""
MAX_LOGPROBS = 20
"""Alternatives that may be told beside a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Bounds and patience of the core. Seconds are of its clock."""

    max_waiting: int = 1024
    max_waiting_tokens: int = 4_194_304
    plans_in_flight: int = 2
    step_timeout_seconds: float = 120.0
    silence_timeout_seconds: float = 15.0
    """A worker with no plan in flight that says nothing for so long is lost."""
    report_steps: bool = False
    """Whether a StepReport comes of every step, lane reset and worker that joins."""
