"""The order in which one plan considers waiting requests.

Owns no state beyond one plan. The order is the queue's, with one exception, cache-aware order: among the first waiting
requests that have the tenant and the priority of the queue's head, the request with the most cached pages goes first,
before those pages are evicted. The head keeps its place, because overtaking it past a request of another tenant would
delay that tenant too. A request is overtaken at most `MAX_PASSED_OVER` times.
"""

from collections.abc import Collection
from itertools import takewhile

from scheduler_svc.core.schedule.policy import MAX_PASSED_OVER
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.request_queue import RequestQueue


class AdmissionOrder:
    """Lives for one plan of `lane`. `suspects` are handles of requests whose last step failed."""

    def __init__(self, lane: Lane, queue: RequestQueue, suspects: Collection[int], *, cache_aware: bool) -> None:
        self._lane, self._queue, self._suspects = lane, queue, suspects
        self._skipped: set[int] = set()
        self._cached_pages: dict[int, int] = {}
        self._may_overtake = cache_aware

    @property
    def has_skipped(self) -> bool:
        """Whether a request was skipped, and so may be ready when the next plan is made."""
        return bool(self._skipped)

    def next(self) -> Request | None:
        """The request to consider now, or None if none is left among the first that wait."""
        waiting = [entry[1] for entry in self._queue.first() if entry[1].handle not in self._skipped]
        if not waiting:
            return None
        head = waiting[0]
        if not self._may_overtake or not head.prefix_root or head.passed_over >= MAX_PASSED_OVER:
            return head
        if head.pending_plans or head.handle in self._suspects:
            return head  # these are never overtaken
        candidates = takewhile(lambda request: self._may_go_before(request, head), waiting[1:])
        return max([head, *candidates], key=self._num_cached_pages)  # the first of several with the most

    def skip(self, request: Request) -> None:
        """The request waits for something that the requests behind it do not need."""
        self._skipped.add(request.handle)

    def stop_overtaking(self, request: Request) -> bool:
        """The request does not fit, so it may not keep out the requests that it would overtake.

        Returns whether another request is next in the queue's own order.
        """
        self._may_overtake = False
        return self.next() is not request

    def admitted(self, request: Request) -> None:
        """The request is admitted, before those of its tenant that stand ahead of it in the queue."""
        for _, other in self._queue.first():
            if other is request:
                return
            if other.prefix_root == request.prefix_root and other.handle not in self._skipped:
                other.pass_over()

    def _may_go_before(self, request: Request, head: Request) -> bool:
        is_peer = request.priority == head.priority and request.prefix_root == head.prefix_root
        return is_peer and not request.pending_plans and request.handle not in self._suspects

    def _num_cached_pages(self, request: Request) -> int:
        """Leading pages of the request that the lane has cached."""
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
