"""The core's view of one worker: its page pool, rows, plans in flight and generation.

Owns that state and its two moments of loss (a request leaves its row; the whole lane is reset). Decides nothing.
"""

from collections import deque

from scheduler_svc.core.events import WorkerInfo
from scheduler_svc.core.page_pool import PagePool
from scheduler_svc.core.plan import InFlight
from scheduler_svc.core.request import Move, Request
from scheduler_svc.core.rows import Rows


class Lane:
    """Opened when a worker joins, reset whenever what it holds can no longer be trusted."""

    def __init__(self, *, worker: str, info: WorkerInfo, generation: int, now: float) -> None:
        self.worker = worker
        self.info = info
        self.heard_at = now
        self.result_at = now
        # Resets since a step was last confirmed.
        self.fruitless_resets = 0
        # Freed pages that may hold values which are not finite; the next plan zeroes them. Kept over a reset.
        self.zero_pages: list[int] = []
        self._open(generation)

    def _open(self, generation: int) -> None:
        self.generation = generation
        self.step = 0
        self.pool = PagePool(self.info.num_pages)
        self.rows = Rows(self.info.max_rows)
        self.in_flight: deque[InFlight] = deque()

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many positions take."""
        return -(-num_tokens // self.info.page_size)

    def leave(self, request: Request, move: Move) -> None:
        """Takes a running request off its row and frees its pages at once.

        Plans in flight may still read and write those pages; the worker applies plans in order, so whoever gets the
        pages next writes them after that.
        """
        row, page_size = request.row, self.info.page_size
        proven, planned = int(self.rows.proven[row]), int(self.rows.planned[row])
        pages = self.rows.unseat(row)
        # What is in flight may yet turn out not finite when nobody looks any more, and a page's next owner multiplies
        # its stale tail by zero, which NaN survives. So what no finite sample has read is zeroed: a page per request.
        # That covers a row that broke: the step which broke it was planned and proved nothing.
        if proven < planned:
            self.zero_pages.extend(pages[proven // page_size : self.pages_for(planned)])
        self.pool.release(pages)
        request.move(move)

    def preempt(self, request: Request) -> None:
        """Takes it off its row, to be computed again later."""
        request.recomputed_tokens += int(self.rows.confirmed[request.row])
        request.preemptions += 1
        self.leave(request, Move.PREEMPT)

    def reset(self, generation: int) -> list[Request]:
        """Drops all rows, pages and plans in flight; returns the requests that ran, rows ascending."""
        requests = self.rows.requests_at(self.rows.seated())
        for request in requests:
            request.recomputed_tokens += int(self.rows.confirmed[request.row])
            request.worker_changes += 1
            self.leave(request, Move.RESET)
        unconfirmed = [int(page) for record in self.in_flight for page in record.zero_pages]
        self.zero_pages = list(dict.fromkeys([*unconfirmed, *self.zero_pages]))
        self._open(generation)
        return requests
