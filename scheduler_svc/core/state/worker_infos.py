"""What requests may count on: the sizes of the workers that serve, and of those that left a short while ago.

Owns both, and what callers learn of them (`served`). Knows nothing of lanes or requests. A worker that dies usually
comes back, so a request that only the lost worker could hold is worth waiting for, but not for ever: its sizes count
for `max_worker_wait_seconds` after it left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler_svc.core.messages.worker_info import WorkerInfo

# Different sizes remembered of workers that left; the oldest are dropped.
_MAX_LEFT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What callers learn: the largest worker that serves, or the last one, and the longest recent sequence."""

    info: WorkerInfo
    recent_max_length: int


class WorkerInfos:
    """Changes only by its methods; `revision` counts the changes."""

    def __init__(self, max_wait_seconds: float) -> None:
        self.revision = 0
        self.present: tuple[WorkerInfo, ...] = ()
        """Of the workers that serve, the largest first."""
        self.served: Served | None = None
        self._max_wait_seconds = max_wait_seconds
        self._left: dict[WorkerInfo, float] = {}

    def update(self, present: Iterable[WorkerInfo]) -> None:
        """The workers that serve now."""
        self.present = tuple(sorted(present, key=lambda info: (-info.max_length, -info.usable_pages)))
        self.revision += 1
        self._tell()

    def left(self, info: WorkerInfo, now: float) -> None:
        """A worker that served is gone; `update` follows."""
        sizes = _sizes(info)
        self._left.pop(sizes, None)
        self._left[sizes] = now
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]

    def expire(self, now: float) -> None:
        """Forgets the sizes of workers that left too long ago."""
        expired = [info for info, at in self._left.items() if now >= at + self._max_wait_seconds]
        for info in expired:
            del self._left[info]
        if expired:
            self.revision += 1
            self._tell()

    def next_expiry(self) -> float | None:
        """When `expire` has something to do; None: never."""
        return min(self._left.values()) + self._max_wait_seconds if self._left else None

    @property
    def recent(self) -> Sequence[WorkerInfo]:
        """Sizes of workers that left, as far as they still count; the last worker's always while none serves."""
        recent = list(self._left)
        if not self.present and self.served is not None:
            recent.append(self.served.info)
        return recent

    @property
    def known(self) -> Sequence[WorkerInfo]:
        """Of the workers that serve, then of those that left; not empty once a worker was proven."""
        return [*self.present, *self.recent]

    def _tell(self) -> None:
        """Brings `served` up to date; it stays the same object where callers would see no difference."""
        if self.present:
            info = self.present[0]
        elif self.served is not None:
            info = self.served.info
        else:
            return
        longest = max(one.max_length for one in (info, *self._left))
        before = self.served
        if before is None or _sizes(before.info) != _sizes(info) or before.recent_max_length != longest:
            self.served = Served(info=info, recent_max_length=longest)


def _sizes(info: WorkerInfo) -> WorkerInfo:
    """Without what differs between two starts of the same worker."""
    return replace(info, pid=0, device="", page_copy_us=0.0, token_us=0.0)
