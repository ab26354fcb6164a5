"""What the lane of a worker that is drained may still do (`draining/`)."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Leaving:
    """The lane starts no request. Its rows run until they move, end, or the lane is closed."""

    is_paused: bool = False
    """Whether the lane makes no plans, because its pool is handed over once its plans in flight are answered."""
    is_dismissed: bool = False
    """Whether the worker was told to end."""
    has_heir: bool = False
    """Whether a standby worker has got its seat already."""
