"""The handles of requests, which are never used twice, and the order of acceptance, in which requests are listed."""

from scheduler_svc.core.queue.kept_requests import KeptRequest, KeptRequests
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.request import Request


class Accepted:
    """Reads the live and the kept requests."""

    def __init__(self, queue: RequestQueue, kept: KeptRequests) -> None:
        self._queue, self._kept = queue, kept
        self.order: list[tuple[int, str]] = []
        """The first handle and the id of each accepted request, ascending. Those that are gone are dropped at times."""
        self.epoch = -1.0
        """When the first request was accepted: no other core has the same."""
        self._next_handle = 1

    def take_handles(self, count: int) -> int:
        """Takes `count` new handles, and returns the first."""
        first, self._next_handle = self._next_handle, self._next_handle + count
        return first

    def record(self, first_handle: int, request_id: str, now: float) -> None:
        """Records the order of a request that was accepted, or restored."""
        if self.epoch < 0:
            self.epoch = now
        self.order.append((first_handle, request_id))
        if len(self.order) > 2 * (len(self._queue) + len(self._kept)) + 64:
            self.order = [each for each in self.order if any(self.of(*each))]

    def of(self, first: int, name: str) -> tuple[tuple[Request, ...], KeptRequest | None]:
        """Returns the live samples and the kept answers of a request. A later one may have the id of one that ended."""
        live, kept = self._queue.by_request_id(name), self._kept.by_id(name)
        if live and live[0].handle - live[0].sample_idx != first:
            live = ()
        return live, None if kept is None or kept.first_handle != first else kept
