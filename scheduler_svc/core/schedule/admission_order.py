"""The order in which one plan considers waiting requests.

It is the order of the queue, with one exception, cache-aware order: of the queue's head and the requests right behind
it that have the same tenant and priority, the request with the most cached pages goes first, so that it still finds
them in the cache. A request of another tenant or priority ends this search, so that it is never overtaken. A request is
overtaken at most `MAX_PASSED_OVER` times.
"""

from itertools import takewhile

from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.queue.waiting_list import WINDOW
from scheduler_svc.core.schedule.placement import Placement
from scheduler_svc.core.schedule.policy import MAX_PASSED_OVER
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


class AdmissionOrder:
    """The order for one plan of `lane`."""

    def __init__(self, lane: Lane, queue: RequestQueue, placement: Placement, *, cache_aware: bool) -> None:
        """The plan looks at the first `WINDOW` requests without those that `placement` has for other lanes."""
        self._lane, self._queue, self._placement = lane, queue, placement
        # The first requests for this lane, and those of them to consider. None: the queue has changed since then.
        self._first: list[Request] | None = None
        self._waiting: list[Request] = []
        self._skipped: set[int] = set()
        self._cached_pages: dict[int, int] = {}
        self._may_overtake = cache_aware

    @property
    def has_skipped(self) -> bool:
        """Whether a request was skipped. It may be admitted to the next plan."""
        return bool(self._skipped)

    def next(self) -> Request | None:
        """Returns the request to consider now, or None if none is left among the first that wait."""
        if self._first is None:
            self._first = self._placement.first_of(self._lane, self._queue, WINDOW)
            self._waiting = [request for request in self._first if request.handle not in self._skipped]
        waiting = self._waiting
        if not waiting:
            return None
        head = waiting[0]
        if len(waiting) == 1 or not self._may_overtake or not head.prefix_root or head.passed_over >= MAX_PASSED_OVER:
            return head
        if head.pending_plans:
            return head  # it is never overtaken
        candidates = takewhile(lambda request: self._may_go_before(request, head), waiting[1:])
        return max([head, *candidates], key=self._num_cached_pages)  # the first of several with the most

    def skip(self, request: Request) -> None:
        """Leaves the request out of this plan, so that the next one is considered."""
        self._skipped.add(request.handle)
        self._waiting.remove(request)

    def queue_changed(self) -> None:
        """Reads the queue again before the next request."""
        self._first = None

    def stop_overtaking(self, request: Request) -> bool:
        """Returns to the order of the queue for the rest of the plan, because the chosen request does not fit.

        Returns whether another request is next in that order.
        """
        self._may_overtake = False
        return self.next() is not request

    def admitted(self, request: Request) -> None:
        """Counts one overtaking for each request of the same tenant that is ahead of this one in the queue."""
        first, self._first = self._first or (), None
        for other in first:
            if other is request:
                return
            if other.prefix_root == request.prefix_root and other.handle not in self._skipped:
                other.pass_over()

    def _may_go_before(self, request: Request, head: Request) -> bool:
        is_peer = request.priority == head.priority and request.prefix_root == head.prefix_root
        return is_peer and not request.pending_plans

    def _num_cached_pages(self, request: Request) -> int:
        """Returns how many leading pages of the request the lane has cached."""
        count = self._cached_pages.get(request.handle)
        if count is None:
            request.hash_known(self._lane.info.page_size)
            count = 0
            if request.cache_read:
                for page_hash in request.page_hashes:
                    if not self._lane.pool.page_with_hash(page_hash):
                        break
                    count += 1
            self._cached_pages[request.handle] = count
        return count
