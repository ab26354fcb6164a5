"""Sends constraints to the workers of lanes, reads their answers, and lets workers drop what no request has any more.

Owns the sources, and never reads one. The states of a lane are in its `LaneResources`; `schedule/` lets it want one.
"""

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import ResourceReady, Submit
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.endings import End
from scheduler_svc.core.state.lane import Lane, prepared
from scheduler_svc.core.state.lane_resources import ANSWER_SECONDS
from scheduler_svc.core.state.request import Phase, Request

MAX_SOURCES_BYTES = 64 << 20
"""Largest size of all sources together."""


class Sources:
    """The source of each constraint that a live request uses, by its hash."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of all sources together."""
        self._sources: dict[bytes, bytes] = {}
        # Live requests with each of them.
        self._users: Counter[bytes] = Counter()
        # The tenant who brought each of them, and the size of all that a tenant brought.
        self._owners: dict[bytes, str] = {}
        self._bytes_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, name: bytes) -> bytes:
        return self._sources[name]

    def users(self) -> dict[bytes, int]:
        """Returns the number of live requests of each constraint."""
        return dict(self._users)

    def is_other(self, name: bytes, source: bytes) -> bool:
        """Returns whether another source has this hash, so that one of the two hashes is wrong."""
        return self._sources.get(name, source) != source

    def refusal(self, name: bytes, source: bytes, tenant: str) -> str:
        """Returns why there is no room for a constraint, in one sentence; empty if there is.

        A tenant may bring as much as is free, so one with the most leaves room for others. Without a token file all
        callers are one tenant, "", who may fill it all.
        """
        if name in self._sources:
            return ""
        size = len(source)
        free = MAX_SOURCES_BYTES - self.num_bytes
        if tenant and self._bytes_of[tenant] + size > free:
            own = self._bytes_of[tenant]
            return f"the caller's own constraints have {own} bytes and this one has {size}; the limit is {free} now"
        if size <= free:
            return ""
        return (
            f"the {len(self._sources)} constraints of live requests have {self.num_bytes} bytes and this one has "
            f"{size}; the limit is {MAX_SOURCES_BYTES}"
        )

    def use(self, name: bytes, source: bytes, tenant: str) -> None:
        """Counts one live request with the constraint."""
        if name not in self._sources:
            self._sources[name], self._owners[name] = source, tenant
            self._bytes_of[tenant] += len(source)
            self.num_bytes += len(source)
        self._users[name] += 1

    def release(self, name: bytes) -> bool:
        """Counts one live request less. Returns whether it was the last one, so that the source was freed."""
        self._users[name] -= 1
        if self._users[name]:
            return False
        del self._users[name]
        size, tenant = len(self._sources.pop(name)), self._owners.pop(name)
        self.num_bytes -= size
        self._bytes_of[tenant] -= size
        if not self._bytes_of[tenant]:
            del self._bytes_of[tenant]
        return True


@dataclass(slots=True)
class Preparations:
    """`_end` ends a live request."""

    _queue: RequestQueue
    _lanes: Lanes
    _end: End
    sources: Sources = field(default_factory=Sources)
    # Whether a request has had a constraint. Without one, nothing here costs time.
    _is_used: bool = False

    # Requests ------------------------------------------------------------------------------------------------------

    def accepted(self, submit: Submit, count: int) -> None:
        """Counts `count` new requests with the constraint of the Submit, if it has one."""
        name = submit.constraint_hash
        if not name:
            return
        self._is_used = True
        for _ in range(count):
            self.sources.use(name, submit.constraint, submit.tenant)
        for lane in self._lanes.by_worker.values():
            lane.resources.used(name)

    def removed(self, request: Request) -> None:
        """Counts a request as ended."""
        if request.constraint and self.sources.release(request.constraint):
            for lane in self._lanes.by_worker.values():
                lane.resources.unused(request.constraint, lane.step)

    # Orders --------------------------------------------------------------------------------------------------------

    def orders(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Returns the orders to prepare what the lane wants."""
        names = lane.resources.take_wanted(now)
        return [fx.PrepareResource(worker=lane.worker, hash=name, source=self.sources[name]) for name in names]

    def drops(self) -> list[fx.Effect]:
        """Returns the orders to drop what no request has any more."""
        if not self._is_used:
            return []
        effects: list[fx.Effect] = []
        for lane in self._lanes.by_worker.values():
            names = lane.resources.take_drops(lane.step - len(lane.in_flight))
            effects += [fx.DropResource(worker=lane.worker, hash=name) for name in names]
        return effects

    # Answers -------------------------------------------------------------------------------------------------------

    def answered(self, event: ResourceReady, now: float) -> list[fx.Effect]:
        """Lets rows with the constraint sample, or ends the requests that need it from this worker."""
        lane = self._lanes.by_worker.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        if not lane.resources.answered(event.hash, ok=not event.error):
            # It answers an order that was given up, so the worker has what the core does not count.
            is_left = not event.error and not lane.resources.knows(event.hash)
            return [fx.DropResource(worker=event.worker, hash=event.hash)] if is_left else []
        if event.error:
            self._fail(lane, event.hash, event.error, now)
        else:
            prepared(lane, event.hash)
        return []

    def expire(self, now: float) -> None:
        """Ends the requests whose workers have not answered in time. Heartbeats cause a Tick often enough."""
        if not self._is_used:
            return
        for lane in self._lanes.by_worker.values():
            for name in lane.resources.overdue(now):
                lane.resources.answered(name, ok=False)
                what = f"worker {lane.worker} has not prepared it within {ANSWER_SECONDS:g} s"
                self._fail(lane, name, what, now)

    def _fail(self, lane: Lane, name: bytes, error: str, now: float) -> None:
        """Ends the requests with the constraint that run on the lane or wait. Those on other lanes go on."""
        for request in list(self._queue):
            if request.constraint == name and (request.phase is Phase.WAITING or request.worker == lane.worker):
                what = f"the constraint cannot be used: {error}"
                self._end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=what))
