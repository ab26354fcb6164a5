"""When the service stops: the requests to stop, from signals and operators, and the times that they set."""

import logging
import time

from scheduler_svc.core.scheduler import Scheduler

log = logging.getLogger("tandem.core")

# Front ends get this long to deliver the last answers, after the grace period and after a second signal.
_FAREWELL_SECONDS, _SHORT_FAREWELL_SECONDS = 5.0, 0.5


class Stop:
    """The first signal, or the drain of the service by an operator, begins the stop. The second signal ends it now."""

    def __init__(self, core: Scheduler, grace_seconds: float) -> None:
        self._core = core
        self._grace_seconds = grace_seconds
        self._farewell_seconds = _FAREWELL_SECONDS
        self._num_seen = 0
        self.deadline: float | None = None
        """When the live requests end; None before the stop has begun."""

    @property
    def has_begun(self) -> bool:
        """Whether the service takes no more requests."""
        return self._num_seen > 0

    def begins(self, num_signals: int) -> bool:
        """Takes note of all requests to stop so far. Returns whether the first one has come since the last call."""
        drains, before = self._core.drains, self._num_seen
        # After an operator's drain the first signal changes nothing: it often follows, as after a preStop hook.
        self._num_seen = max(num_signals, int(drains.is_stop_wanted))
        now = time.monotonic()
        if not before and self._num_seen:
            self.deadline = drains.stop_at or now + self._grace_seconds
            seconds = self.deadline - now
            log.info("stopping: new requests are refused, %d have %.3g s to end", len(self._core.queue), seconds)
            log.info("a second signal stops the service now")
        if self._num_seen > 1 and before < 2:
            log.warning("stopping now: %d requests end as UNAVAILABLE", len(self._core.queue))
            self.deadline, self._farewell_seconds = now, _SHORT_FAREWELL_SECONDS
        if drains.stop_at is not None and self.deadline is not None:
            self.deadline = min(self.deadline, drains.stop_at)
        return self._num_seen > 0 and not before

    def is_grace_over(self) -> bool:
        """Returns whether the live requests must end."""
        return self._is_past(0.0)

    def is_farewell_over(self) -> bool:
        """Returns whether the front ends have had time for the last answers."""
        return self._is_past(self._farewell_seconds)

    def _is_past(self, extra_seconds: float) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline + extra_seconds
