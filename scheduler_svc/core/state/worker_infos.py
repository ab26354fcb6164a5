"""The limits of the workers: those present, and those that left a short while ago.

A request must fit on one of them. A worker that crashes usually comes back, so the limits of a worker that left remain
valid for `max_worker_wait_seconds`, and a request that fits only there waits as long. `served` is what callers see.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler_svc.core.messages.worker_info import WorkerInfo

# Number of different limits remembered of workers that left. Beyond it the oldest is dropped.
_MAX_LEFT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What callers see of the workers."""

    info: WorkerInfo
    """The largest worker present, or the last one if none is."""
    recent_max_length: int
    """Largest `max_length` of `info` and the workers that left recently."""


class WorkerInfos:
    """The infos of the proven workers that are present, and of those that left recently."""

    def __init__(self, max_wait_seconds: float) -> None:
        self.revision = 0
        """Number of changes, for callers that have to react to each."""
        self.present: tuple[WorkerInfo, ...] = ()
        """Proven workers that are present, the largest first."""
        self.served: Served | None = None
        """None until a worker is proven."""
        self._max_wait_seconds = max_wait_seconds
        self._left: dict[WorkerInfo, float] = {}

    def update(self, present: Iterable[WorkerInfo]) -> None:
        """Replaces the infos of the workers that are present."""
        self.present = tuple(sorted(present, key=lambda info: (-info.max_length, -info.usable_pages)))
        self.revision += 1
        self._update_served()

    def left(self, info: WorkerInfo, now: float) -> None:
        """Records that a proven worker has left. The caller calls `update` next."""
        limits = _limits(info)
        self._left.pop(limits, None)
        self._left[limits] = now
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]

    def expire(self, now: float) -> None:
        """Drops workers that left at least `max_worker_wait_seconds` ago."""
        expired = [info for info, at in self._left.items() if now >= at + self._max_wait_seconds]
        for info in expired:
            del self._left[info]
        if expired:
            self.revision += 1
            self._update_served()

    def next_expiry(self) -> float | None:
        """Returns the time at which `expire` drops the next worker, or None."""
        return min(self._left.values()) + self._max_wait_seconds if self._left else None

    @property
    def recent(self) -> Sequence[WorkerInfo]:
        """Workers that left and still count. While no worker is present, the last one always counts."""
        recent = list(self._left)
        if not self.present and self.served is not None:
            recent.append(self.served.info)
        return recent

    @property
    def known(self) -> Sequence[WorkerInfo]:
        """Workers that are present, then those that left recently. Not empty once a worker was proven."""
        return [*self.present, *self.recent]

    def _update_served(self) -> None:
        """Updates `served`. It stays the same object if callers would see no difference."""
        if self.present:
            info = self.present[0]
        elif self.served is not None:
            info = self.served.info
        else:
            return
        longest = max(one.max_length for one in (info, *self._left))
        before = self.served
        if before is None or _limits(before.info) != _limits(info) or before.recent_max_length != longest:
            self.served = Served(info=info, recent_max_length=longest)


def _limits(info: WorkerInfo) -> WorkerInfo:
    """Returns the info without the fields that differ between two starts of the same worker."""
    return replace(info, pid=0, device="", page_copy_us=0.0, token_us=0.0)
