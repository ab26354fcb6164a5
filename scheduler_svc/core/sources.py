"""The sources of resources that live requests need, as opaque bytes under their names. Never reads one."""

from collections import Counter
from dataclasses import dataclass

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.resources import KINDS, Need, Resource
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request
from tandem_contract.plural import numbered


@dataclass(slots=True)
class _Source:
    content: bytes
    tenant: str
    """The tenant that brought it."""
    users: int = 0
    """Live requests with it."""


class Sources:
    """The source of each resource that a live request needs, by its name."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.is_used = False
        """Whether a request has needed a resource. Without one, resources cost no time."""
        self._sources: dict[Need, _Source] = {}
        # By kind and tenant: the size of all that the tenant brought.
        self._bytes: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def num_bytes(self, kind: str) -> int:
        """Returns the size of all sources of a kind together."""
        return sum(size for (one, _), size in self._bytes.items() if one == kind)

    def audit(self, users: Counter[Need]) -> None:
        """Checks that these are the users, and the sizes of the sources."""
        assert {need: one.users for need, one in self._sources.items()} == users, "users of resources are miscounted"
        for kind in KINDS.values():
            sizes = [len(one.content) for need, one in self._sources.items() if need.kind == kind.name]
            assert self.num_bytes(kind.name) == sum(sizes) <= kind.max_total_bytes

    def is_other(self, resource: Resource) -> bool:
        """Returns whether another source has this hash, so that one of the two hashes is wrong."""
        source = self._sources.get(resource.need)
        return source is not None and source.content != resource.source

    def refusal(self, resource: Resource, tenant: str) -> str:
        """Returns why a resource has no room, in one sentence; empty if it has.

        A tenant may bring as much as is free, so one with the most leaves room for others. Without a token file all
        callers are one tenant, "", and may fill it all.
        """
        if resource.need in self._sources:
            return ""
        kind, size = KINDS[resource.kind], len(resource.source)
        taken, brought = self.num_bytes(kind.name), self._bytes[kind.name, tenant]
        free = kind.max_total_bytes - taken
        if tenant and brought + size > free:
            have = f"the caller's own {kind.plural} have {numbered(brought, 'byte')}"
            return f"{have} and this one has {size}; the limit is {free} now"
        if size <= free:
            return ""
        count = sum(need.kind == kind.name for need in self._sources)
        return (
            f"the {count} {kind.plural} of live requests have {numbered(taken, 'byte')} and this one has "
            f"{size}; the limit is {kind.max_total_bytes}"
        )

    def accepted(self, submit: Submit, count: int) -> None:
        """Counts `count` new requests with the resources of the Submit."""
        for resource in submit.resources:
            self.is_used, need = True, resource.need
            if need not in self._sources:
                self._sources[need] = _Source(resource.source, submit.tenant)
                self._bytes[need.kind, submit.tenant] += len(resource.source)
            self._sources[need].users += count
            for lane in self._lanes.values():
                lane.resources.used(need)

    def removed(self, request: Request) -> None:
        """Counts a request as ended, and frees the sources that no other needs."""
        for need in request.needs:
            one = self._sources[need]
            one.users -= 1
            if one.users:
                continue
            del self._sources[need]
            self._bytes[need.kind, one.tenant] -= len(one.content)
            if not self._bytes[need.kind, one.tenant]:
                del self._bytes[need.kind, one.tenant]
            for lane in self._lanes.values():
                lane.resources.unused(need, lane.step)

    def orders(self, lane: Lane, now: float) -> list[fx.Effect]:
        return [
            fx.PrepareResource(worker=lane.worker, hash=need.hash, source=self._sources[need].content, kind=need.kind)
            for need in lane.resources.take_wanted(now)
        ]
