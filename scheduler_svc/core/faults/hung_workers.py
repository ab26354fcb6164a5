"""Gives up workers that hang: a step takes too long, or the worker is silent between steps (`limits/step_clock.py`)."""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.workers.lanes import Lanes


class HungWorkers:
    """Watches the workers of all lanes, also those on standby."""

    def __init__(self, config: CoreConfig, lanes: Lanes) -> None:
        self._config = config
        self._lanes = lanes

    def next_timeout(self) -> float | None:
        """Returns the time at which the first worker is given up, None without a worker."""
        first = None
        for lane in self._lanes.by_worker.values():
            at = lane.timeout(self._config)
            if first is None or at < first:
                first = at
        return first

    def give_up(self, now: float) -> list[fx.Effect]:
        """Closes the lanes of workers that hang. Each of them is killed, or joins again if it still runs."""
        first = self.next_timeout()
        if first is None or now < first:
            return []
        config, effects = self._config, list[fx.Effect]()
        for lane in [lane for lane in self._lanes.by_worker.values() if now >= lane.timeout(config)]:
            if lane.weights.loading is None:
                reason = lane.clock.why_given_up(lane.in_flight, config, now)
            else:
                reason = f"it has not loaded weights {lane.weights.loading.version!r} in time"
            self._lanes.counters.worker_hung()
            effects += self._lanes.close(lane.worker, reason, now, ResetCause.WORKER_SILENT)
            effects += [fx.KillWorker(worker=lane.worker), fx.AskRejoin(worker=lane.worker)]
        return effects

    def paused(self, seconds: float) -> None:
        """Excuses all workers for a time in which the scheduler did not run."""
        for lane in self._lanes.by_worker.values():
            lane.clock.paused(seconds, is_working=bool(lane.in_flight))
            lane.weights.paused(seconds)
            lane.constraints.paused(seconds)
