"""One step's plan while it is being made: what was decided so far, and the moves that decide it.

Owns the decisions until `commit` makes them binding. It seats, grows and preempts rows of its lane; who is seated,
grown or preempted the planner says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.messages.plan import RowStart
from scheduler_svc.core.schedule.logit_budget import LogitRoom
from scheduler_svc.core.schedule.plan_size import start_bytes
from scheduler_svc.core.schedule.policy import saving_pays
from scheduler_svc.core.schedule.prefix_match import Beginning
from scheduler_svc.core.state.host_pool import HostPage
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.request_queue import RequestBook


@dataclass(slots=True, kw_only=True)
class Counters:
    """Since the core's start."""

    steps: int = 0
    preemptions: int = 0
    resets: int = 0
    prompt_tokens: int = 0
    """Of all requests admitted to a row."""
    cached_prompt_tokens: int = 0
    """Of these, found in kept pages."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """`chunks` are (row, positions), `budget` tokens that the step may still cost."""

    lane: Lane
    book: RequestBook
    frontend_idx: Callable[[str], int]
    counters: Counters
    now: float
    budget: int
    bytes_left: int
    """Encoded bytes that the plan has for further started rows."""
    room: LogitRoom
    starts: list[RowStart] = field(default_factory=list[RowStart])
    appends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    chunks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    fresh: list[int] = field(default_factory=list[int])
    """Rows seated in this step that decode at once: one position of theirs is not computed yet."""
    has_preempted: bool = False
    saves: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """Page, host page, hash."""
    copies: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """From page, to page, tokens."""
    loads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Host page, page."""
    kept: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])

    # Rows ----------------------------------------------------------------------------------------------------------

    def seat(self, request: Request, begin: Beginning, end: int) -> int:
        """Gives a waiting request a row, with pages for its positions before `end`; they must be there."""
        lane, book = self.lane, self.book
        book.take(request)
        request.move(Move.ADMIT)
        self._account(request, begin)
        for page in begin.shared:
            lane.pool.share(page)
        own = lane.hand_out(lane.pages_for(end) - len(begin.pages) + begin.num_loaded)
        assert own is not None, f"request {request.request_id} was seated without pages"
        following = iter(own)
        pages: list[int] = []
        for page_idx, page in enumerate(begin.pages):
            match page:
                case HostPage():
                    pages.append(next(following))
                    self._load(pages[-1], page, request.page_hashes[page_idx])
                case None:
                    pages.append(0)
                case _:
                    pages.append(page)
        pages += following
        first = begin.first_position
        if begin.fork is not None:
            source, num_tokens = begin.fork
            self.copies.append((source, pages[len(begin.pages)], num_tokens))
        held_from = lane.first_seen_page(first) if None in begin.pages else 0
        row = lane.rows.seat(
            request, pages, self.frontend_idx(request.frontend), first_position=first, held_from=held_from
        )
        request.worker = lane.worker
        self.starts.append(_start(request, row, pages, first))
        self.bytes_left -= start_bytes(request, len(pages))
        return row

    def has_bytes_for(self, request: Request, num_pages: int) -> bool:
        """Whether the plan stays within its size when it starts the request; the first row always may."""
        return not self.starts or start_bytes(request, num_pages) <= self.bytes_left

    def _account(self, request: Request, begin: Beginning) -> None:
        first = begin.first_position
        request.recomputed_tokens += max(0, request.computed - first)
        if request.admitted_at is None:
            request.admitted_at = self.now
            request.cached_prompt_tokens = first
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.cached_prompt_tokens += first

    def _load(self, page: int, host_page: HostPage, page_hash: bytes) -> None:
        self.loads.append((host_page.slot, page))
        self.lane.host.touch(page_hash)
        if self.lane.pool.keep(page, page_hash, host_page.tokens):
            self.kept.append((page, page_hash))

    def grow(self, row: int, num_tokens: int) -> bool:
        """Pages for the row's positions before `num_tokens`; False, and no change, where too few are left."""
        rows = self.lane.rows
        missing = self.lane.pages_for(num_tokens) - int(rows.num_pages[row])
        if missing <= 0:
            return True
        pages = self.lane.hand_out(missing)
        if pages is None:
            return False
        for page in pages:
            rows.append_page(row, page)
            self.appends.append((row, page))
        return True

    def grow_by_one(self, crossing: list[int]) -> bool:
        """The next page for each of these rows, which need one; False, and no change, where too few are left."""
        pages = self.lane.hand_out(len(crossing))
        if pages is None:
            return False
        self.lane.rows.append_pages(crossing, pages)
        self.appends += zip(crossing, pages, strict=True)
        return True

    def preempt(self, victim: Request) -> None:
        """Takes it off its row, to go on later from what is kept; saves its pages where that pays."""
        lane = self.lane
        victim.preemptions += 1
        self.counters.preemptions += 1
        self.has_preempted = lane.has_preempted = True
        # A plan saves before it loads: what it loads may not be saved over.
        if not self.loads and saving_pays(lane.info):
            self.saves += lane.save(victim, len(self.saves))
        lane.leave(victim, Move.PREEMPT)
        self.book.enqueue(victim)

    # Work ----------------------------------------------------------------------------------------------------------

    def chunk(self, row: int, start: int, count: int) -> None:
        """The row computes so many positions from `start` on; pages that this fills are kept for others at once.

        A request that begins alike may share them in this very step: each layer writes before it attends.
        """
        lane = self.lane
        align = lane.info.chunk_align
        self.chunks.append((row, count))
        self.budget -= -(-count // align) * align
        request, page_size = lane.rows.request_at(row), lane.info.page_size
        if not request.cache_write:
            return
        pages, hashes = lane.rows.pages[row], request.page_hashes
        for page_idx in range(start // page_size, min((start + count) // page_size, len(hashes))):
            page, page_hash = pages[page_idx], hashes[page_idx]
            if not lane.pool.page_named(page_hash) and lane.pool.keep(
                page, page_hash, request.page_tokens(page_idx, page_size)
            ):
                self.kept.append((page, page_hash))

    def decode_at_once(self, row: int) -> None:
        """A row seated in this step whose last known token is all that is left."""
        self.fresh.append(row)
        self.budget -= 1


def _start(request: Request, row: int, pages: list[int], first_position: int) -> RowStart:
    return RowStart(
        row=row,
        tokens=request.known_tokens(),
        pages=np.array(pages, np.int32),
        first_position=first_position,
        num_prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        sample_idx=request.sample_idx,
        banned_until=request.prompt_tokens + request.min_new_tokens,
        banned=request.banned,
        num_logprobs=request.num_logprobs,
        prompt_logprobs_from=request.prompt_logprobs_from,
    )
