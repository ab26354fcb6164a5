"""Which events and effects of the core are deaths, for which the flight recorder writes a file. Owns the list."""

from typing import Any

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev


def cause_of(one: Any) -> str | None:
    """Returns a sentence if an event or effect is the death of a worker or a front end."""
    match one:
        case ev.WorkerLost(is_orderly=False):
            return f"worker {one.worker} was lost"
        case ev.FrontendLost():
            return f"front end {one.frontend} was lost"
        case fx.KillWorker():
            return f"worker {one.worker} hangs"
        case _:
            return None


def cause_of_end(frontend: str, end: fx.End) -> str | None:
    """Returns a sentence if the service is to blame for the end: the request killed its workers, say."""
    if end.failure is None or end.failure.code is not fx.FailureCode.INTERNAL:
        return None
    return f"a request of {frontend or 'no front end'} failed, stream {end.stream}"
