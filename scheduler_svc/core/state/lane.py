"""The core's view of one worker: its pages, what is kept of them, its rows, plans in flight and generation.

Owns that state and its moments of loss (a request leaves its row; the whole lane is reset). Decides nothing.
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
"""A worker whose step takes longer may never answer: requests are not left to it while others have room."""


class Lane:
    """Opened when a worker joins, reset whenever what it runs can no longer be trusted."""

    def __init__(self, *, worker: str, number: int, info: WorkerInfo, generation: int, now: float) -> None:
        self.worker = worker
        self.number = number
        """Unique among the lanes of the core's life: the older lane has the lower one."""
        self.info = info
        self.heard_at = now
        self.result_at = now
        self.fruitless_resets = 0
        """Resets since a step was last confirmed."""
        self.sink_pages = -(-info.sink_tokens // info.page_size)
        """Leading pages that every position sees, whatever the window."""
        self.pool = PagePool(info.num_pages)
        self.host = HostPool(info.host_pages)
        self.schedule = LaneSchedule()
        self.is_proven = False
        """Whether the worker has confirmed a step, or need not."""
        self._open(generation)

    def _open(self, generation: int) -> None:
        self.generation = generation
        self.step = 0
        # Pages handed out that the next plan must zero first.
        self._zero_pages: list[int] = []
        self.schedule.reset()
        self.rows = Rows(self.info.max_rows, self.info.page_size)
        self.in_flight: deque[SentPlan] = deque()

    # Sizes ---------------------------------------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many positions take."""
        return -(-num_tokens // self.info.page_size)

    def first_seen_page(self, position: int) -> int:
        """The first page past the sink pages that the position, or one after it, reads; 0 without a window."""
        window = self.info.window
        return max(0, position - window + 1) // self.info.page_size if window else 0

    # Pages ---------------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Pages for somebody's own use, None where too few are left; the next plan zeroes those that need it."""
        pages = self.pool.allocate(count)
        if pages is not None:
            self._zero_pages += self.pool.take_unverified(pages)
        return pages

    def held_pages(self, row: int) -> list[int]:
        """What the row holds, in logical order: all but those behind a window."""
        pages, held_from = self.rows.pages[row], int(self.rows.held_from[row])
        if held_from <= self.sink_pages:
            return pages
        return pages[: self.sink_pages] + pages[held_from:]

    def holds(self, row: int, page_idx: int) -> bool:
        """Whether the row still holds its page of this logical index."""
        return page_idx < self.sink_pages or page_idx >= self.rows.held_from[row]

    def free_behind_windows(self) -> None:
        """Frees what no position from a row's next one on will read.

        Plans in flight may still read it; the worker carries plans out in order, so whoever gets a page next writes it
        after that.
        """
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
        """Gives a waiting request a row with these pages, which the lane allocated or shares; returns the row."""
        request.move(Move.ADMIT)
        request.worker = self.worker
        return self.rows.seat(request, pages, frontend_idx, first_position=first_position, held_from=held_from)

    # Plans and results ---------------------------------------------------------------------------------------------

    def take_zero_pages(self) -> list[int]:
        """Pages that the plan being made must zero before all else."""
        pages, self._zero_pages = self._zero_pages, []
        return pages

    def plan_made(self, record: SentPlan) -> None:
        """The lane's next plan was made; `record` is what its result is read against."""
        assert record.step == self.step + 1, f"step {record.step} planned after step {self.step}"
        self.step = record.step
        self.in_flight.append(record)
        self.schedule.forget_lookups()

    def result_confirmed(self) -> None:
        """The oldest plan in flight was carried out, and its result is valid."""
        self.in_flight.popleft()
        self.schedule.forget_lookups()
        self.fruitless_resets = 0

    def count_fruitless_reset(self) -> int:
        """A step went wrong; returns how many did in a row."""
        self.fruitless_resets += 1
        return self.fruitless_resets

    def excuse_resets(self) -> None:
        """The steps that went wrong were a request's fault, not the worker's."""
        self.fruitless_resets = 0

    def heard(self, now: float) -> None:
        """The worker sent a sign of life."""
        self.heard_at = now

    def answered(self, now: float) -> None:
        """The worker sent a result."""
        self.heard_at = self.result_at = now

    def prove(self) -> None:
        """The worker confirmed its first step, or need not: requests may run on it."""
        self.is_proven = True

    # Answers -------------------------------------------------------------------------------------------------------

    def working_since(self) -> float:
        """Since when the answer to the oldest plan in flight, there must be one, is what the worker works at."""
        # That plan may have been sent while others ran before it.
        return max(self.in_flight[0].sent_at, self.result_at)

    def is_overdue(self, now: float) -> bool:
        """Whether its worker takes so long over a step that nobody is left to it until it answers."""
        return bool(self.in_flight) and now - self.working_since() > OVERDUE_SECONDS

    def awaits(self, request: Request) -> bool:
        """Whether a plan in flight names the request."""
        return any(request.handle in record.handles for record in self.in_flight)

    # Loss ----------------------------------------------------------------------------------------------------------

    def leave(self, request: Request, move: Move) -> None:
        """Takes a running request off its row and frees its pages at once; what the index names stays to be found.

        Plans in flight may still read and write those pages, as in `free_behind_windows`.
        """
        row, rows = request.row, self.rows
        planned = int(rows.planned[row])
        confirmed = int(rows.confirmed[row])
        # What it was to compute again was counted when it got its row.
        request.recomputed_tokens -= max(0, request.computed - confirmed)
        request.computed = max(request.computed, confirmed)
        held = self.held_pages(row)
        if planned and rows.verified[row] == planned == rows.confirmed[row]:
            # All that was ever written to the last page, a finite sample has read; full ones were sealed before.
            last = (planned - 1) // self.info.page_size
            if self.holds(row, last) and last * self.info.page_size >= rows.verified_from[row]:
                self.pool.mark_verified(rows.pages[row][last])
        rows.unseat(row)
        self.pool.release(held)
        request.worker = ""
        request.move(move)

    def evict_unverified(self, request: Request) -> None:
        """Takes out of the index what no finite sample has read of a request whose values are not finite."""
        pool = self.pool
        for page_hash in request.page_hashes:
            page = pool.page_with_hash(page_hash)
            if page and pool.is_unverified(page):
                pool.evict(page)
            if self.host.is_unverified(page_hash):
                self.host.evict(page_hash)

    def reset(self, generation: int, *, keep_pages: bool) -> list[Request]:
        """Drops all rows and plans in flight; returns the requests that ran, rows ascending.

        The index keeps pages whose every step is confirmed, or none.
        """
        requests = self.rows.requests_at(self.rows.seated())
        for request in requests:
            self.leave(request, Move.RESET)
        for record in self.in_flight:
            self._void(record)
        if not keep_pages:
            self.pool.evict_all()
            self.host.evict_all()
        self._open(generation)
        return requests

    def _void(self, record: SentPlan) -> None:
        """Nobody knows how far the plan came."""
        for page, page_hash in record.cached:
            if self.pool.hash_of(page) == page_hash:
                self.pool.evict(page)
        for page_hash in record.swapped_out:
            self.host.evict(page_hash)

    def swap_out(self, request: Request, num_written: int) -> list[tuple[int, int, bytes]]:
        """Room in host memory for the named pages of a running request: page, host page, hash.

        `num_written` host pages this plan writes already, which may not be lost again.
        """
        swap_outs: list[tuple[int, int, bytes]] = []
        table = self.rows.pages[request.row]
        for page_idx, page_hash in enumerate(request.page_hashes[: len(table)]):
            if num_written + len(swap_outs) >= self.host.num_slots:
                break
            page = table[page_idx]
            # Only those that it alone holds: what others share stays on the device.
            if self.pool.hash_of(page) != page_hash or self.pool.references(page) != 1:
                continue
            slot = self.host.store(page_hash, self.pool.tokens(page), unverified=self.pool.is_unverified(page))
            if slot is not None:
                swap_outs.append((page, slot, page_hash))
        return swap_outs
