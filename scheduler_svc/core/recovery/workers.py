"""Workers that join and leave, and those on standby."""

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import WorkerJoined, WorkerLost


class Workers(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Forgets the sizes and the page pools of workers that left too long ago."""
        self._lanes.worker_infos.expire(now)
        self._core.held_pools.expire(now)
        return []

    def next_wake(self) -> float | None:
        return self._lanes.worker_infos.next_expiry()

    @handles(WorkerJoined)
    def _joined(self, event: WorkerJoined, now: float) -> list[fx.Effect]:
        return self._lanes.join(event, now)

    @handles(WorkerLost)
    def _lost(self, event: WorkerLost, now: float) -> list[fx.Effect]:
        if event.worker not in self._lanes:
            return []
        is_orderly = event.is_orderly
        return self._lanes.close(event.worker, event.reason, now, is_death=not is_orderly, is_orderly=is_orderly)


class Standby(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        return self._lanes.seat_due(now)

    def next_wake(self) -> float | None:
        return self._lanes.next_seating()

    def audit(self) -> None:
        """Checks that callers see the sizes of the serving workers."""
        serving = [lane for lane in self._lanes.values() if lane.phases.serves and lane.phases.stays]
        info, sizes = self._core.info, [(lane.info.max_length, lane.info.usable_pages) for lane in serving]
        if sizes:
            assert info is not None, "a worker serves, and callers see no model"
            assert (info.max_length, info.usable_pages) == max(sizes), "callers see sizes that no worker has"
