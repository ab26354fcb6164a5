"""Chooses which standby worker is seated, and when one is seated although no worker was lost.

A standby worker has joined and its first step succeeded, but no request runs on it. The functions are pure.
"""

from collections.abc import Container, Iterable

from scheduler_svc.core.state.lane import Lane

PATIENCE_SECONDS = 1.0
"""After the start of the core, standby workers wait this long for a worker without that flag.

Workers join a restarted scheduler in any order within half a second. Without this wait a standby worker that is first
would be seated, and then the worker that served before.
"""


def first_proven(lanes: Iterable[Lane], leaving: Container[str]) -> Lane | None:
    """Returns the standby lane that has been proven for the longest time and is not `leaving`, None without one.

    One that has the newest weights comes first.
    """
    waiting = [
        (not lane.weights.admits, lane.proven_at, lane.number, lane)
        for lane in lanes
        if not lane.is_seated and lane.proven_at is not None and lane.worker not in leaving
    ]
    return min(waiting)[3] if waiting else None


def seat_due_at(lanes: Iterable[Lane], leaving: Container[str], *, was_seated: bool) -> float | None:
    """Returns when a standby worker is to be seated if only standby workers are there; None if none is proven.

    `was_seated`: a worker has been seated since the core's start; then a
    standby worker is due as soon as it is proven.
    """
    first = first_proven(lanes, leaving)
    if first is None or first.proven_at is None:
        return None
    return first.proven_at if was_seated else first.proven_at + PATIENCE_SECONDS
