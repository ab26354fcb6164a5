"""The sources of constraints that live requests use, as opaque bytes under their hashes. Never reads one."""

from collections import Counter

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request

MAX_SOURCES_BYTES = 64 << 20
"""Largest size of all sources together."""


class Sources:
    """The source of each constraint that a live request uses, by its hash."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.is_used = False
        """Whether a request has had a constraint. Without one, constraints cost no time."""
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

    def audit(self, users: Counter[bytes]) -> None:
        """Checks that these are the users, and the sizes of the sources."""
        assert self._users == users, "the users of constraints are miscounted"
        assert self.num_bytes == sum(len(self[name]) for name in users) <= MAX_SOURCES_BYTES

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

    def accepted(self, submit: Submit, count: int) -> None:
        """Counts `count` new requests with the constraint of the Submit, if it has one."""
        name = submit.constraint_hash
        if not name:
            return
        self.is_used = True
        for _ in range(count):
            self.use(name, submit.constraint, submit.tenant)
        for lane in self._lanes.values():
            lane.constraints.used(name)

    def removed(self, request: Request) -> None:
        """Counts a request as ended."""
        if request.constraint and self.release(request.constraint):
            for lane in self._lanes.values():
                lane.constraints.unused(request.constraint, lane.step)

    def orders(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Returns the orders to prepare what the lane wants."""
        names = lane.constraints.take_wanted(now)
        return [fx.PrepareConstraint(worker=lane.worker, hash=name, source=self[name]) for name in names]
