"""A lane: the core's state for one worker, which is its page pool, its host pool, its rows and its plans in flight.

A lane does not decide what runs (`schedule/` does). Its methods change rows, pages and plans together, so that these
always agree.

**Pages.** A row holds one reference to each of its pages, until its request leaves the row or the lane is reset. With
an attention window, later positions of a row read only the pages in the window and the sink pages, which hold the first
`sink_tokens` positions. The lane releases all other pages while the row runs. They stay in the row's page list, because
the worker's table keeps them too.

**Plans in flight.** A plan that was sent may still read or write pages that have been released since. This is safe
because the worker applies plans in order: the next owner of a page writes it in a later plan.

**Reset.** If a step fails or the worker is lost, the rows and the plans in flight are dropped and the lane begins a new
generation. Results of older generations are ignored. The worker drops its rows at the first plan of the new generation.
"""

from collections import deque

import numpy as np

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.host_pool import HostPool
from scheduler_svc.core.state.lane_schedule import LaneSchedule
from scheduler_svc.core.state.page_pool import PagePool
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.rows import Rows

OVERDUE_SECONDS = 2.0
"""A worker that takes longer than this for a step may never answer. Until it does, other lanes do not leave requests to
it."""


class Lane:
    """Created when a worker joins, and dropped when the worker is lost."""

    def __init__(self, *, worker: str, number: int, info: WorkerInfo, generation: int, now: float) -> None:
        self.worker = worker
        self.number = number
        """Number of the lane, counted from the core's start. An older lane has a lower number."""
        self.info = info
        self.heard_at = now
        """Time of the worker's last message."""
        self.result_at = now
        """Time of the worker's last result."""
        self.fruitless_resets = 0
        """Failed steps since a step was last confirmed."""
        self.sink_pages = -(-info.sink_tokens // info.page_size)
        """Number of leading pages that every position reads, in addition to its window."""
        self.pool = PagePool(info.num_pages)
        self.host = HostPool(info.host_pages)
        self.schedule = LaneSchedule()
        self.is_proven = False
        """Whether the worker has confirmed a step, or does not have to."""
        self._open(generation)

    def _open(self, generation: int) -> None:
        self.generation = generation
        self.step = 0
        """Number of the last plan in this generation."""
        # Allocated pages that the next plan must zero.
        self._zero_pages: list[int] = []
        self.schedule.reset()
        self.rows = Rows(self.info.max_rows, self.info.page_size)
        self.in_flight: deque[SentPlan] = deque()
        """Plans without a result, oldest first."""

    # Sizes ---------------------------------------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for `num_tokens` positions."""
        return -(-num_tokens // self.info.page_size)

    def first_seen_page(self, position: int) -> int:
        """Returns the index of the first page in the position's window. Later positions read no earlier page.

        Sink pages are not considered. Returns 0 without a window.
        """
        window = self.info.window
        return max(0, position - window + 1) // self.info.page_size if window else 0

    # Pages ---------------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Allocates pages, or returns None if too few are unused. The next plan zeroes those that need it."""
        pages = self.pool.allocate(count)
        if pages is not None:
            self._zero_pages += self.pool.take_unverified(pages)
        return pages

    def held_pages(self, row: int) -> list[int]:
        """Returns the pages that the row holds, in logical order: all but those behind the window."""
        pages, held_from = self.rows.pages[row], int(self.rows.held_from[row])
        if held_from <= self.sink_pages:
            return pages
        return pages[: self.sink_pages] + pages[held_from:]

    def holds(self, row: int, page_idx: int) -> bool:
        """Returns whether the row still holds its page with this logical index."""
        return page_idx < self.sink_pages or page_idx >= self.rows.held_from[row]

    def free_behind_windows(self) -> None:
        """Releases each row's pages that neither its next position nor a later one reads."""
        if not self.info.window:
            return
        rows, seated = self.rows, self.rows.seated()
        seen = np.minimum((rows.planned[seated] - self.info.window + 1) // self.info.page_size, rows.num_pages[seated])
        start = np.maximum(rows.held_from[seated], self.sink_pages)
        for i in np.flatnonzero(seen > start).tolist():
            row = int(seated[i])
            self.pool.release(rows.pages[row][start[i] : seen[i]])
            rows.held_from[row] = seen[i]

    # Rows ----------------------------------------------------------------------------------------------------------

    def seat(
        self, request: Request, pages: list[int], frontend_idx: int, *, first_position: int, held_from: int
    ) -> int:
        """Gives a waiting request a row with these pages, each with a reference for it, and returns the row.

        The pages hold the positions before `first_position`. `held_from` is as in `Rows`.
        """
        request.move(Move.ADMIT)
        request.worker = self.worker
        return self.rows.seat(request, pages, frontend_idx, first_position=first_position, held_from=held_from)

    # Plans and results ---------------------------------------------------------------------------------------------

    def take_zero_pages(self) -> list[int]:
        """Returns the pages that the plan being made must zero, and clears the list."""
        pages, self._zero_pages = self._zero_pages, []
        return pages

    def plan_made(self, record: SentPlan) -> None:
        """Adds the record of a new plan to the plans in flight."""
        assert record.step == self.step + 1, f"step {record.step} planned after step {self.step}"
        self.step = record.step
        self.in_flight.append(record)
        self.schedule.clear_lookups()

    def result_confirmed(self) -> None:
        """Removes the oldest plan in flight, because its result is valid."""
        self.in_flight.popleft()
        self.schedule.clear_lookups()
        self.fruitless_resets = 0

    def count_fruitless_reset(self) -> int:
        """Counts a failed step. Returns the number of failed steps since a step was last confirmed."""
        self.fruitless_resets += 1
        return self.fruitless_resets

    def excuse_resets(self) -> None:
        """Sets the count of failed steps to zero, because a request and not the worker made them fail."""
        self.fruitless_resets = 0

    def heard(self, now: float) -> None:
        """Records that the worker sent a message."""
        self.heard_at = now

    def answered(self, now: float) -> None:
        """Records that the worker sent a result."""
        self.heard_at = self.result_at = now

    def prove(self) -> None:
        """Records that requests may run on the worker."""
        self.is_proven = True

    # Waiting for results -------------------------------------------------------------------------------------------

    def working_since(self) -> float:
        """Returns the time at which the worker began the oldest plan in flight. There must be one."""
        # The plan may have been sent while the worker was still computing an earlier one.
        return max(self.in_flight[0].sent_at, self.result_at)

    def is_overdue(self, now: float) -> bool:
        """Returns whether the worker has taken more than `OVERDUE_SECONDS` for its current step."""
        return bool(self.in_flight) and now - self.working_since() > OVERDUE_SECONDS

    def awaits(self, request: Request) -> bool:
        """Returns whether a plan in flight contains the request."""
        return any(request.handle in record.handles for record in self.in_flight)

    # Leaving and reset ---------------------------------------------------------------------------------------------

    def leave(self, request: Request, move: Move) -> None:
        """Takes a running request off its row and releases its pages at once. Cached pages stay cached.

        `move` is the request's transition: preempted, reset or ended.
        """
        row, rows = request.row, self.rows
        planned = int(rows.planned[row])
        confirmed = int(rows.confirmed[row])
        # `Request.admitted` counted all positions to recompute. Those without a confirmed result do not count.
        request.recomputed_tokens -= max(0, request.computed - confirmed)
        request.computed = max(request.computed, confirmed)
        held = self.held_pages(row)
        if planned and rows.verified[row] == planned == rows.confirmed[row]:
            # A finite sample has read every position that was ever written, so the last page is verified although it
            # is not full. `cache_full_pages` has dealt with the full pages.
            last = (planned - 1) // self.info.page_size
            if self.holds(row, last) and last * self.info.page_size >= rows.verified_from[row]:
                self.pool.mark_verified(rows.pages[row][last])
        rows.unseat(row)
        self.pool.release(held)
        request.worker = ""
        request.move(move)

    def evict_unverified(self, request: Request) -> None:
        """Evicts the unverified pages of a request that had non-finite logits, here and in host memory."""
        pool = self.pool
        for page_hash in request.page_hashes:
            page = pool.page_with_hash(page_hash)
            if page and pool.is_unverified(page):
                pool.evict(page)
            if self.host.is_unverified(page_hash):
                self.host.evict(page_hash)

    def reset(self, generation: int, *, keep_pages: bool) -> list[Request]:
        """Drops all rows and plans in flight, and begins a new generation. Returns the requests that ran, by row.

        If `keep_pages`, pages that were filled by confirmed steps stay cached. Otherwise all pages are evicted.
        """
        requests = self.rows.requests_at(self.rows.seated())
        for request in requests:
            self.leave(request, Move.RESET)
        for record in self.in_flight:
            self._evict_pages_of(record)
        if not keep_pages:
            self.pool.evict_all()
            self.host.evict_all()
        self._open(generation)
        return requests

    def _evict_pages_of(self, record: SentPlan) -> None:
        """Evicts the pages that a void plan was to fill or swap out, because it is unknown how far the worker got."""
        for page, page_hash in record.cached:
            if self.pool.hash_of(page) == page_hash:
                self.pool.evict(page)
        for page_hash in record.swapped_out:
            self.host.evict(page_hash)

    def swap_out(self, request: Request, num_written: int) -> list[tuple[int, int, bytes]]:
        """Assigns host pages to the cached pages that only this running request holds.

        Returns (page, host page, hash) for each. `num_written` is the number of host pages that the current plan
        writes already. They must not be replaced within the plan, so the sum stays within the number of host pages.
        """
        swap_outs: list[tuple[int, int, bytes]] = []
        table = self.rows.pages[request.row]
        for page_idx, page_hash in enumerate(request.page_hashes[: len(table)]):
            if num_written + len(swap_outs) >= self.host.num_slots:
                break
            page = table[page_idx]
            # A page that other rows share stays on the device.
            if self.pool.hash_of(page) != page_hash or self.pool.references(page) != 1:
                continue
            slot = self.host.store(page_hash, self.pool.tokens(page), unverified=self.pool.is_unverified(page))
            if slot is not None:
                swap_outs.append((page, slot, page_hash))
        return swap_outs
