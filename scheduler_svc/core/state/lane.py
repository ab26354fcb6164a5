"""A lane: the core's state for one worker, with its page pool, host pool, rows and plans in flight.

A lane does not decide what runs (`schedule/` does). Its methods change rows, pages and plans together, so that these
always agree.

**Pages.** A row holds one reference to each of its pages, until its request leaves the row or the lane is reset. With
an attention window, later positions of a row read only the pages in the window and the sink pages, which hold the first
`sink_tokens` positions. The lane releases all other pages while the row runs. They stay in the row's page list, because
the worker's table keeps them too.

**Plans in flight.** A plan in flight may still read or write pages that were released after it was sent. This is safe
because the worker applies plans in order: the next owner of a page writes it in a later plan.

**Reset.** If a step fails or the worker is lost, the rows and the plans in flight are dropped and the lane begins a new
generation. Results of older generations are ignored. The worker drops its rows at the first plan of the new generation.

**Full pages.** A step that attended to pages and gave finite logits verifies them. Pages with output tokens enter the
prefix cache here, because their tokens are not known before the result arrives. The pages of a prompt enter it earlier,
when the plan that fills them is made (`plan_builder`), so that requests with equal prompts share them within one step.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import Weights
from scheduler_svc.core.messages.plan import SentPlan, TakeOver
from scheduler_svc.core.messages.resources import Blocks, takes
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.pages.host_pool import HostPool
from scheduler_svc.core.pages.lane_pages import LanePages
from scheduler_svc.core.pages.page_index import PageIndex
from scheduler_svc.core.pages.page_pool import PagePool
from scheduler_svc.core.state.lane_phase import LaneMove, LanePhase, LanePhases
from scheduler_svc.core.state.lane_resources import LaneResources
from scheduler_svc.core.state.lane_schedule import LaneSchedule, LaneWeights
from scheduler_svc.core.state.memory_limit import MemoryLimit
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.rows import Rows
from scheduler_svc.core.state.step_clock import StepClock

OVERDUE_SECONDS = 2.0
"""A worker that takes longer than this for a step is overdue. The placement of requests then ignores its lane."""


class Lane:
    """The lane of one worker. It is created when the worker joins and dropped when the worker is lost."""

    def __init__(
        self,
        *,
        worker: str,
        number: int,
        info: WorkerInfo,
        generation: int,
        now: float,
        page_index: PageIndex | None = None,
    ) -> None:
        """`page_index` has the cached pages of all lanes; a lane without one has an index of its own."""
        self.worker = worker
        self.number = number
        """Number of the lane, counted from the core's start. An older lane has a lower number."""
        self.info = info
        self.clock, self.memory = StepClock(info, now), MemoryLimit(info)
        self.failed_steps = 0
        """Failed steps since the last confirmed step, without those that a request made fail."""
        self.sink_pages = -(-info.sink_tokens // info.page_size)
        """Number of leading pages that every position reads, in addition to its window."""
        self.pages = LanePages(info, page_index)
        self.host = self.pages.host
        """The pages in the worker's host memory."""
        self.schedule, self.weights, self.resources = LaneSchedule(), LaneWeights(), LaneResources()
        self.proven_at = float("inf")
        """When the worker's first step succeeded, or it joined with `prove_workers` off."""
        self.phases = LanePhases(LanePhase.STANDBY_PROBATION if info.is_standby else LanePhase.PROBATION)
        self._open(generation)

    def _open(self, generation: int) -> None:
        self.generation = generation
        self.step = 0
        """Number of the last plan in this generation."""
        self.pages.take_zero_pages()  # no plan of the old generation follows
        self.schedule.reset()
        self.rows = Rows(self.info.max_rows, self.info.page_size, self.info.longest_sequence)
        self.in_flight: deque[SentPlan] = deque()
        """Plans without a result, oldest first."""

    @property
    def pool(self) -> PagePool:
        """The page pool that the worker uses."""
        return self.pages.pool

    # Sizes ---------------------------------------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for `num_tokens` positions."""
        return -(-num_tokens // self.info.page_size)

    def first_seen_page(self, position: int) -> int:
        """Returns the index of the first page in the position's window, or 0 without a window.

        This position and later ones read no earlier page except sink pages.
        """
        window = self.info.window
        return max(0, position - window + 1) // self.info.page_size if window else 0

    @property
    def num_free_rows(self) -> int:
        """Number of requests that may be seated now."""
        return max(0, min(self.rows.num_free, self.memory.max_rows - self.rows.num_seated))

    # Pages ---------------------------------------------------------------------------------------------------------

    def held_pages(self, row: int) -> list[int]:
        """Returns the pages that the row holds, in logical order, without those behind the window."""
        pages, held_from = self.rows.pages[row], int(self.rows.held_from[row])
        if held_from <= self.sink_pages:
            return pages
        return pages[: self.sink_pages] + pages[held_from:]

    def holds(self, row: int, page_idx: int) -> bool:
        """Returns whether the row still holds its page with this logical index."""
        return page_idx < self.sink_pages or page_idx >= self.rows.held_from[row]

    # Rows ----------------------------------------------------------------------------------------------------------

    def seat(
        self, request: Request, pages: list[int], frontend_idx: int, *, first_position: int, held_from: int
    ) -> int:
        """Seats a waiting request in a row and returns the row. The caller has added a reference to each of the pages.

        The pages hold the positions before `first_position`. `held_from` is as in `Rows`.
        """
        request.move(Move.ADMIT)
        request.worker = self.worker
        request.weights.begin(self.info.weights_version, request.num_outputs)
        return self.rows.seat(request, pages, frontend_idx, first_position=first_position, held_from=held_from)

    # Plans and results ---------------------------------------------------------------------------------------------

    def take_over(self, pool: PagePool, take_over: TakeOver) -> None:
        """Replaces the page pool, which no row uses, by that of a lost worker. The next plan names it to the worker."""
        self.pages.take_over(pool, take_over)
        self.schedule.reset()

    def take_over_ended(self, wanted: bytes, used: bytes) -> None:
        """Records the result of a plan that named pool `wanted` to take over; the worker uses pool `used` now."""
        self.in_flight[0] = replace(self.in_flight[0], takes_over=b"")
        self.pages.answered(wanted, used)

    def plan_made(self, record: SentPlan) -> None:
        assert record.step == self.step + 1, f"step {record.step} planned after step {self.step}"
        self.step = record.step
        self.in_flight.append(record)
        self.schedule.lookups.clear()

    def result_confirmed(self) -> None:
        """Removes the oldest plan in flight, because its result is valid."""
        record = self.in_flight.popleft()
        self.clock.confirmed(record)
        self.memory.confirmed(record)
        self.schedule.lookups.clear()
        self.failed_steps = 0

    def prove(self, now: float) -> None:
        """Records that the worker's first step succeeded, or that `prove_workers` is off."""
        self.phases.move(LaneMove.PROVE)
        self.proven_at = now

    def take_weights(self, weights: Weights) -> None:
        """Records that the worker has loaded these weights."""
        self.info = replace(self.info, weights_version=weights.version, weights_folder=weights.folder)

    # Waiting for results -------------------------------------------------------------------------------------------

    def timeout(self, config: CoreConfig) -> float:
        """Returns the time on the core's clock at which the worker is given up, unless it is heard before."""
        return self.weights.until if self.phases.is_loading else self.clock.timeout(self.in_flight, config)

    def is_overdue(self, now: float) -> bool:
        """Returns whether the worker has taken more than `OVERDUE_SECONDS` for its current step."""
        return bool(self.in_flight) and now - self.clock.began_at(self.in_flight[0]) > OVERDUE_SECONDS

    def awaits(self, request: Request) -> bool:
        """Returns whether a plan in flight contains the request."""
        return any(request.handle in record.handles for record in self.in_flight)

    # Unseating and reset -------------------------------------------------------------------------------------------

    def unseat(self, request: Request, move: Move) -> None:
        """Removes a running request from its row and releases its pages. Cached pages stay cached.

        `move` is the request's transition: PREEMPT, RESET or END.
        """
        row, rows = request.row, self.rows
        planned = int(rows.planned[row])
        confirmed = int(rows.confirmed[row])
        # Admission counted all positions from first_position to `computed` as recomputed. Subtract those that the row
        # did not recompute before the request leaves it.
        request.recomputed_tokens -= max(0, request.computed - confirmed)
        request.computed = max(request.computed, confirmed)
        held = self.held_pages(row)
        if planned and rows.verified[row] == planned == rows.confirmed[row]:
            # All written positions are verified, so the last page is verified although it is not full. The full pages
            # were marked by `cache_full_pages`.
            last = (planned - 1) // self.info.page_size
            if self.holds(row, last) and last * self.info.page_size >= rows.verified_from[row]:
                self.pool.mark_verified(rows.pages[row][last])
        rows.unseat(row)
        self.pool.release(held)
        request.worker = ""
        request.move(move)

    def reset(self, generation: int, *, keep_pages: bool) -> list[Request]:
        """Drops all rows and plans in flight, and begins a new generation. Returns the requests that ran, in row order.

        If `keep_pages`, pages that were filled by confirmed steps stay cached. Otherwise all pages are evicted.
        """
        requests = self.rows.requests_at(self.rows.seated())
        for request in requests:
            self.unseat(request, Move.RESET)
        self.clock.voided(self.in_flight)
        for record in self.in_flight:
            evict_pages_of(record, self.pool, self.host)
            if record.takes_over:
                self.pages.pool_id = b""  # it is unknown which pool the worker uses
        if not keep_pages:
            self.pages.evict_all()
        self.pages.labels.lane_reset(self.in_flight, keep_pages=keep_pages)
        self.resources.reset()
        self._open(generation)
        return requests


def evict_unverified(request: Request, pool: PagePool, host: HostPool) -> None:
    """Evicts the unverified pages of a request with non-finite logits."""
    for page_hash in request.page_hashes:
        page = pool.page_with_hash(page_hash)
        if page and pool.is_unverified(page):
            pool.evict(page)
        if host.is_unverified(page_hash):
            host.evict(page_hash)


def evict_pages_of(record: SentPlan, pool: PagePool, host: HostPool) -> None:
    """Evicts the pages that a void plan fills or swaps out, because the worker may not have carried it out."""
    for page, page_hash in record.cached:
        if pool.hash_of(page) == page_hash:
            pool.evict(page)
    for page_hash in record.swapped_out:
        host.evict(page_hash)


def free_behind_windows(lane: Lane) -> None:
    """Releases each row's pages that neither its next position nor a later one reads."""
    info, rows = lane.info, lane.rows
    if not info.window:
        return
    seated = rows.seated()
    seen = np.minimum((rows.planned[seated] - info.window + 1) // info.page_size, rows.num_pages[seated])
    start = np.maximum(rows.held_from[seated], lane.sink_pages)
    for i in np.flatnonzero(seen > start).tolist():
        row = int(seated[i])
        lane.pool.release(rows.pages[row][start[i] : seen[i]])
        rows.held_from[row] = seen[i]


def swap_out(lane: Lane, request: Request, num_written: int) -> list[tuple[int, int, bytes]]:
    """Assigns host pages to the cached pages that only this running request holds, for the plan being made.

    Returns (page, host page, hash) for each. `num_written` is the number of host pages that the plan writes
    already. The plan must not write a host page twice, so it writes at most as many as the pool has.
    """
    swap_outs: list[tuple[int, int, bytes]] = []
    table = lane.rows.pages[request.row]
    for page_idx, page_hash in enumerate(request.page_hashes[: len(table)]):
        if num_written + len(swap_outs) >= lane.host.num_slots:
            break
        page = table[page_idx]
        # A page that other rows share stays on the device.
        if lane.pool.hash_of(page) != page_hash or lane.pool.references(page) != 1:
            continue
        slot = lane.host.store(page_hash, lane.pool.tokens(page), unverified=lane.pool.is_unverified(page))
        if slot is not None:
            swap_outs.append((page, slot, page_hash))
    return swap_outs


def holds(lane: Lane, request: Request, known: int | None = None) -> bool:
    """Returns whether the lane's worker can run the request to its end; with an unset maximum, whether it gets a token.

    `known` are the known tokens of a request that runs on another lane.
    """
    info, length = lane.info, request.least_length(request.known if known is None else known)
    return info.holds(length) and (not request.needs or takes(info, request.needs))


def may_sample(lane: Lane, request: Request) -> bool:
    """Returns whether a row with the request could sample now: the worker has prepared all that it needs."""
    return not request.needs or all(lane.resources.is_ready(need) for need in request.needs)


def may_start(lane: Lane, request: Request) -> bool:
    """Returns whether the worker has prepared what the request needs before it gets a row."""
    return all(lane.resources.is_ready(need) or need.of_kind.blocks is Blocks.SAMPLING for need in request.needs)


def want(lane: Lane, request: Request) -> None:
    """Lets the worker prepare what the request needs, unless it has or was already asked to."""
    for need in request.needs:
        lane.resources.want(need)


def prepared(lane: Lane) -> None:
    """Lets rows sample for which the worker has prepared the last that they need."""
    for request in lane.rows.requests_at(lane.rows.awaits_needs.nonzero()[0]):
        if may_sample(lane, request):
            lane.rows.await_needs(request.row, False)


def cache_full_pages(lane: Lane, row: int) -> None:
    """Marks and caches the pages of the row that became full and verified since the last call."""
    rows, pool, page_size = lane.rows, lane.pool, lane.info.page_size
    request = rows.request_at(row)
    table, hashes = rows.pages[row], request.page_hashes
    first, full = int(rows.num_cached[row]), int(rows.verified[row]) // page_size
    if rows.cache_at[row] == 1 and lane.info.window:
        # Finite logits of the first sampled token verify only the positions in its window; `verified_from` excludes the
        # earlier ones.
        rows.verified_from[row] = max(0, int(rows.verified[row]) - lane.info.window)
    verified_from = int(rows.verified_from[row])
    labels = lane.pages.labels
    may_cache = bool(request.submit.prefix_root) and request.submit.cache_write and not request.weights.keeps_pages
    for page_idx in range(first, full):
        is_held = lane.holds(row, page_idx)
        page = table[page_idx]
        if is_held and page_idx * page_size >= verified_from:
            if labels.is_on and pool.is_unverified(page):
                labels.add(page)
            pool.mark_verified(page)
        if not may_cache or (page_idx < len(hashes) and (not is_held or pool.page_with_hash(hashes[page_idx]))):
            continue
        # A page behind the window is not cached, but the hashes of the pages after it depend on its hash.
        tokens = rows.tokens_between(row, page_idx * page_size, (page_idx + 1) * page_size).tobytes()
        page_hash = hashes[page_idx] if page_idx < len(hashes) else request.add_hash(tokens)
        if is_held:
            pool.cache(page, page_hash, tokens)
    rows.num_cached[row] = full
    rows.cache_at[row] = (full + 1) * page_size
