"""Owns the time that a call's deadline leaves."""

from typing import Any

from scheduler_svc.frontend.rpc import status


def seconds_left(context: Any) -> float:
    """The seconds until the caller's deadline; 0 without a deadline. Raises Refusal if the deadline has passed."""
    # None without a deadline, although the stubs promise a float.
    seconds = context.time_remaining()
    if seconds is None:
        return 0.0
    if seconds <= 0:
        raise status.deadline_passed("the deadline passed before the request was admitted")
    return seconds
