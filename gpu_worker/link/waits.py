"""How long the link may wait for frames while no plan is in flight. Owns the times between its frames."""

import math

HEARTBEAT_SECONDS = 0.8
# The pause before a Join that could not be sent is tried again.
_JOIN_RETRY_SECONDS = 0.02
# While a constraint is prepared: its answer comes from another process.
_PREPARING_SECONDS = 2e-3


def idle_ms(now: float, last_sent: float, join_at: float | None, *, is_open: bool, is_preparing: bool) -> int:
    """Milliseconds, at least 1. join_at: when a Join is due; None if it was sent. is_open: whether it can be sent."""
    until = now + HEARTBEAT_SECONDS
    if join_at is None:
        until = last_sent + HEARTBEAT_SECONDS
    elif is_open:
        until = max(join_at, now + _JOIN_RETRY_SECONDS)
    if is_preparing:
        until = min(until, now + _PREPARING_SECONDS)
    return max(1, math.ceil((until - now) * 1e3))
