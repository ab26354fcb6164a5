"""The sources of resources that live requests need, as opaque bytes under their names. Never reads one."""

from collections import Counter

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.resources import KINDS, Need, Resource
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request
from tandem_contract.plural import numbered


class Sources:
    """The source of each resource that a live request needs, by its name."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.is_used = False
        """Whether a request has needed a resource. Without one, resources cost no time."""
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

    def audit(self, users: Counter[Need]) -> None:
        """Checks that these are the users, and the sizes of the sources."""
        assert self._users == users, "the users of resources are miscounted"
        for kind in KINDS.values():
            sizes = [len(self[need]) for need in users if need.kind == kind.name]
            assert self.num_bytes(kind.name) == sum(sizes) <= kind.max_total_bytes

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
            have = f"the caller's own {kind.plural} have {numbered(own, 'byte')}"
            return f"{have} and this one has {size}; the limit is {free} now"
        if size <= free:
            return ""
        count = sum(need.kind == kind.name for need in self._sources)
        return (
            f"the {count} {kind.plural} of live requests have {numbered(taken, 'byte')} and this one has "
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

    def accepted(self, submit: Submit, count: int) -> None:
        """Counts `count` new requests with the resources of the Submit."""
        for resource in submit.resources:
            self.is_used = True
            for _ in range(count):
                self.use(resource, submit.tenant)
            for lane in self._lanes.values():
                lane.resources.used(resource.need)

    def removed(self, request: Request) -> None:
        """Counts a request as ended."""
        for need in request.needs:
            if self.release(need):
                for lane in self._lanes.values():
                    lane.resources.unused(need, lane.step)

    def orders(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Makes the orders to prepare what the lane wants."""
        return [
            fx.PrepareResource(worker=lane.worker, hash=need.hash, source=self[need], kind=need.kind)
            for need in lane.resources.take_wanted(now)
        ]
