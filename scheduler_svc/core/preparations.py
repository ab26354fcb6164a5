"""Sends resources to the workers of lanes, reads their answers, and lets workers drop what no request needs any more.

Owns the sources, and never reads one. The states of a lane are in its `LaneResources`; `schedule/` lets it want one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import ResourceReady, Submit
from scheduler_svc.core.messages.resources import KINDS, Need, Resource
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.endings import End
from scheduler_svc.core.state.lane import Lane, prepared
from scheduler_svc.core.state.lane_resources import State
from scheduler_svc.core.state.request import Phase, Request


class Sources:
    """The source of each resource that a live request needs, by its name."""

    def __init__(self) -> None:
        self._sources: dict[Need, bytes] = {}
        # Live requests with each of them.
        self._users: Counter[Need] = Counter()
        # The tenant who brought each of them.
        self._owners: dict[Need, str] = {}
        # By kind and tenant: the size of all that the tenant brought.
        self._bytes: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, need: Need) -> bytes:
        return self._sources[need]

    def num_bytes(self, kind: str) -> int:
        """Returns the size of all sources of a kind together."""
        return sum(size for (one, _), size in self._bytes.items() if one == kind)

    def users(self) -> dict[Need, int]:
        """Returns the number of live requests of each resource."""
        return dict(self._users)

    def is_other(self, resource: Resource) -> bool:
        """Returns whether another source has this hash, so that one of the two hashes is wrong."""
        return self._sources.get(resource.need, resource.source) != resource.source

    def refusal(self, resource: Resource, tenant: str) -> str:
        """Returns why there is no room for a resource, in one sentence; empty if there is.

        A tenant may bring as much as is free, so one with the most leaves room for others. Without a token file all
        callers are one tenant, "", who may fill it all.
        """
        if resource.need in self._sources:
            return ""
        kind, size = KINDS[resource.kind], len(resource.source)
        taken, own = self.num_bytes(kind.name), self._bytes[kind.name, tenant]
        free = kind.max_total_bytes - taken
        if tenant and own + size > free:
            return f"the caller's own {kind.plural} have {own} bytes and this one has {size}; the limit is {free} now"
        if size <= free:
            return ""
        count = sum(need.kind == kind.name for need in self._sources)
        return (
            f"the {count} {kind.plural} of live requests have {taken} bytes and this one has "
            f"{size}; the limit is {kind.max_total_bytes}"
        )

    def use(self, resource: Resource, tenant: str) -> None:
        """Counts one live request with the resource."""
        need = resource.need
        if need not in self._sources:
            self._sources[need], self._owners[need] = resource.source, tenant
            self._bytes[need.kind, tenant] += len(resource.source)
        self._users[need] += 1

    def release(self, need: Need) -> bool:
        """Counts one live request less. Returns whether it was the last one, so that the source was freed."""
        self._users[need] -= 1
        if self._users[need]:
            return False
        del self._users[need]
        key = need.kind, self._owners.pop(need)
        self._bytes[key] -= len(self._sources.pop(need))
        if not self._bytes[key]:
            del self._bytes[key]
        return True


@dataclass(slots=True)
class Preparations:
    """`_end` ends a live request."""

    _queue: RequestQueue
    _lanes: Lanes
    _end: End
    sources: Sources = field(default_factory=Sources)
    # Whether a request has needed a resource. Without one, nothing here costs time.
    _is_used: bool = False

    # Requests ------------------------------------------------------------------------------------------------------

    def accepted(self, submit: Submit, count: int) -> None:
        """Counts `count` new requests with the resources of the Submit."""
        for resource in submit.resources:
            self._is_used = True
            for _ in range(count):
                self.sources.use(resource, submit.tenant)
            for lane in self._lanes.by_worker.values():
                lane.resources.used(resource.need)

    def removed(self, request: Request) -> None:
        """Counts a request as ended."""
        for need in request.needs:
            if self.sources.release(need):
                for lane in self._lanes.by_worker.values():
                    lane.resources.unused(need, lane.step)

    # Orders --------------------------------------------------------------------------------------------------------

    def orders(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Returns the orders to prepare what the lane wants."""
        return [
            fx.PrepareResource(worker=lane.worker, hash=need.hash, source=self.sources[need], kind=need.kind)
            for need in lane.resources.take_wanted(now)
        ]

    def drops(self) -> list[fx.Effect]:
        """Returns the orders to drop what no request needs any more."""
        if not self._is_used:
            return []
        effects: list[fx.Effect] = []
        for lane in self._lanes.by_worker.values():
            effects += _drops(lane.worker, lane.resources.take_drops(lane.step - len(lane.in_flight)))
        return effects

    # Answers -------------------------------------------------------------------------------------------------------

    def answered(self, event: ResourceReady, now: float) -> list[fx.Effect]:
        """Lets requests with the resource go on, or ends those that need it from this worker."""
        lane, need = self._lanes.by_worker.get(event.worker), Need(event.kind, event.hash)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        if not lane.resources.answered(need, ok=not event.error):
            # It answers an order that was given up, so the worker has what the core does not count.
            is_left = not event.error and lane.resources.state(need) is State.DROPPED
            return _drops(event.worker, [need]) if is_left else []
        if event.error:
            self._fail(lane, need, event.error, now)
        else:
            prepared(lane)
        return []

    def expire(self, now: float) -> None:
        """Ends the requests whose workers have not answered in time. Heartbeats cause a Tick often enough."""
        if not self._is_used:
            return
        for lane in self._lanes.by_worker.values():
            for need in lane.resources.overdue(now):
                lane.resources.answered(need, ok=False)
                seconds = need.of_kind.answer_seconds
                self._fail(lane, need, f"worker {lane.worker} has not prepared it within {seconds:g} s", now)

    def _fail(self, lane: Lane, need: Need, error: str, now: float) -> None:
        """Ends the requests with the resource that run on the lane or wait. Those on other lanes go on."""
        for request in list(self._queue):
            if need in request.needs and (request.phase is Phase.WAITING or request.worker == lane.worker):
                what = f"the {need.kind} cannot be used: {error}"
                self._end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=what))


def _drops(worker: str, needs: Sequence[Need]) -> list[fx.Effect]:
    return [fx.DropResource(worker=worker, hash=need.hash, kind=need.kind) for need in needs]
