"""The limits of the workers that are present, and of those that left recently.

A request must fit on one of them. A worker that crashes usually comes back, so the limits of a worker that left remain
valid for `max_worker_wait_seconds`. A request that fits only there waits at most that long. Callers see `served`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler_svc.core.messages.resources import KINDS, Kind, Need, takes
from scheduler_svc.core.messages.worker_info import WorkerInfo

# Largest number of workers that left and are remembered. If more leave, the oldest one is dropped.
_MAX_DEPARTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The limits that callers see."""

    info: WorkerInfo
    """The largest present worker, or the last one if none is present."""
    recent_max_length: int
    """Largest `max_length` of `info` and the workers that left recently."""
    refusals: dict[str, str]
    """By kind of resource: why it is refused; empty if a known worker takes it."""


class WorkerInfos:
    """The infos of the proven workers that are present, and of those that left recently."""

    def __init__(self, max_wait_seconds: float) -> None:
        self.revision = 0
        """Number of changes, so that the scheduler notices each."""
        self.present: tuple[WorkerInfo, ...] = ()
        """Proven workers that are present, with the largest first."""
        self.longest_present = 0
        """`longest_sequence` of the present workers, 0 without one."""
        self.known: tuple[WorkerInfo, ...] = ()
        """Workers that are present, then those that left recently. Not empty after a worker was proven."""
        self.served: Served | None = None
        """None until a worker is proven."""
        self._max_wait_seconds = max_wait_seconds
        self._departed: dict[WorkerInfo, float] = {}

    def update(self, present: Iterable[WorkerInfo]) -> None:
        """Replaces the infos of the workers that are present."""
        self.present = tuple(sorted(present, key=lambda info: (-info.max_length, -info.usable_pages)))
        self._changed()

    def worker_left(self, info: WorkerInfo, now: float) -> None:
        """Records that a proven worker has left. The caller calls `update` next."""
        limits = _limits(info)
        self._departed.pop(limits, None)
        self._departed[limits] = now
        if len(self._departed) > _MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]

    def expire(self, now: float) -> None:
        """Drops workers that left at least `max_worker_wait_seconds` ago."""
        if not self._departed:
            return
        expired = [info for info, at in self._departed.items() if now >= at + self._max_wait_seconds]
        for info in expired:
            del self._departed[info]
        if expired:
            self._changed()

    def next_expiry(self) -> float | None:
        """Returns the time on the core's clock at which `expire` drops the next worker, or None."""
        return min(self._departed.values()) + self._max_wait_seconds if self._departed else None

    def longest_present_for(self, needs: Sequence[Need]) -> int:
        """Returns the largest `longest_sequence` of the present workers that take all that a request needs."""
        if not needs:
            return self.longest_present
        return max((info.longest_sequence for info in self.present if takes(info, needs)), default=0)

    @property
    def longest_known(self) -> int:
        """The largest `longest_sequence` of the known workers. Call it only after a worker was proven."""
        return max(info.longest_sequence for info in self.known)

    @property
    def recent(self) -> Sequence[WorkerInfo]:
        """Workers that left recently. If no worker is present, the last one is included however long ago it left."""
        recent = list(self._departed)
        if not self.present and self.served is not None:
            recent.append(self.served.info)
        return recent

    def _changed(self) -> None:
        """Updates what follows. `served` stays the same object if callers would see no difference."""
        self.revision += 1
        self.longest_present = max((info.longest_sequence for info in self.present), default=0)
        before = self.served
        info = self.present[0] if self.present else before and before.info
        if info is not None:
            infos = (info, *self.present, *self._departed)
            longest = max(one.max_length for one in (info, *self._departed))
            refusals = {kind.name: _refusal(kind, infos) for kind in KINDS.values()}
            served = Served(info=info, recent_max_length=longest, refusals=refusals)
            if before is None or replace(before, info=_limits(before.info)) != replace(served, info=_limits(info)):
                self.served = served
        self.known = (*self.present, *self.recent)


def _refusal(kind: Kind, infos: Sequence[WorkerInfo]) -> str:
    """Returns why the first worker takes no resource of the kind, unless one of the others does."""
    return "" if any(not kind.refusal(info) for info in infos) else kind.refusal(infos[0])


def _limits(info: WorkerInfo) -> WorkerInfo:
    """Returns the info without the fields that differ between two starts of the same worker."""
    return replace(
        info,
        pid=0,
        device="",
        page_copy_us=0.0,
        token_us=0.0,
        is_standby=False,
        pool_id=b"",
        weights_version="",
        weights_folder="",
    )
