"""Collects the decisions of one plan, until `finish_plan` makes the plan from them.

The builder seats, grows and preempts rows of its lane; the planner decides which ones.

**Prompt logprobs** of one step are limited by the number of logit rows. The worker computes logits for a limited number
of positions per step (`WorkerInfo.logit_rows`): one logit row for each row that samples, and one for each prompt
position with a wanted logprob. The logprob of position p comes from the logits at p - 1, so a chunk of positions s to
e - 1 gives the logprobs of s + 1 to e, if they are in the prompt and wanted.

**Size.** A started row carries all its tokens and pages (`StartedRows` in worker.proto), so a plan that starts many
long rows could exceed the largest frame that the worker accepts, which ends its connection. The results are upper
bounds; tests compare them with encoded plans. Example: 300 requests of one 66,000-token document move to a new worker
in 5 plans of at most 16.7 MB; one plan of 83.9 MB would end the connection.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.messages.events import MAX_SAMPLING_BYTES
from scheduler_svc.core.messages.plan import RowStart, WantedPromptLogprobs
from scheduler_svc.core.messages.resources import KINDS
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.pages.host_pool import HostPage
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.placement import Placement
from scheduler_svc.core.schedule.policy import ending_budget, swapping_pays
from scheduler_svc.core.schedule.prefix_match import PrefixMatch
from scheduler_svc.core.schedule.trials import EVERYBODY, Turn
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane, may_sample, swap_out
from scheduler_svc.core.state.request import Move, Request

DETACHED = 0
"""The index that stands for no front end, for requests without a reader. Front ends count from 1."""
# Bytes of the scalars of one started row, and of the tags and lengths of its fields.
_ROW_BYTES = 176
# Bytes of what a row needs besides a constraint: its hash, and the name of its kind.
_NEED_BYTES = 128
# Bytes of a plan without its rows and pages.
_PLAN_BYTES = 4096
# Bytes that a row may have besides its tokens: its sampling, and the token ids banned before min_new_tokens.
_MAX_EXTRA_BYTES = MAX_SAMPLING_BYTES + 4 * (2 * 1024)
# A page may be zeroed (1 int32 value) and appended to a row (2).
_BYTES_PER_PAGE = 4 * (1 + 2)
# One page may be swapped out (2 int32 values), and one swapped in (2).
_BYTES_PER_HOST_PAGE = 4 * (2 + 2)
# A row has a chunk (row, start, count, whether it samples) and a copy (source, target, count), as int32 values.
_BYTES_PER_ROW = 4 * (4 + 3)


def start_bytes(request: Request, num_pages: int) -> int:
    """Returns an upper bound on the bytes that a plan needs to start the request with `num_pages` pages."""
    of_needs = _NEED_BYTES * len(request.other_needs) if request.needs else 0
    return _ROW_BYTES + of_needs + 4 * (request.known + num_pages + len(request.banned)) + len(request.submit.sampling)


def largest_plan_bytes(info: WorkerInfo, max_plan_bytes: int) -> int:
    """Returns an upper bound on the bytes of any plan for the worker if plans start rows up to `max_plan_bytes`."""
    of_needs = _NEED_BYTES * (len(KINDS) - 1)
    longest_row = (
        _ROW_BYTES + of_needs + _MAX_EXTRA_BYTES + 4 * (info.max_length + -(-info.max_length // info.page_size))
    )
    pages = _BYTES_PER_PAGE * info.num_pages + _BYTES_PER_HOST_PAGE * min(info.num_pages, info.host_pages)
    return _PLAN_BYTES + max(max_plan_bytes, longest_row) + _BYTES_PER_ROW * info.max_rows + pages


def wanted_positions(first: int, prompt_tokens: int, start: int, end: int) -> range:
    """Returns the positions with logprobs from a chunk of `start` to `end - 1`. `first` is the first wanted, or 0."""
    if not first:
        return range(0)
    return range(max(first, start + 1), min(end, prompt_tokens - 1) + 1)


def wanted_by_chunk(request: Request, first: int, start: int, end: int) -> WantedPromptLogprobs | None:
    """Returns the prompt logprobs that a chunk of the request gives, None if it gives none."""
    wanted = wanted_positions(first, request.prompt_tokens, start, end)
    if not wanted:
        return None
    top_k = max(0, request.submit.num_logprobs - 1)
    return WantedPromptLogprobs(handle=request.handle, start=wanted.start, count=len(wanted), top_k=top_k)


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """The plan that is being made, at the core's time `now`."""

    lane: Lane
    queue: RequestQueue
    placement: Placement
    """Assigns waiting requests to lanes."""
    frontends: Mapping[str, int]
    """Index of each front end, by name."""
    counters: Counters
    policy: Policy
    now: float
    bytes_left: int
    """Number of encoded bytes left for further started rows."""
    turn: Turn = EVERYBODY
    """Which requests the plan is for while some are suspected."""
    budget: int = field(init=False)
    """Number of tokens that the step may still compute."""
    has_preempted: bool = False
    """Whether a request was preempted because pages were missing, so that nothing is admitted."""
    starts: list[RowStart] = field(init=False)
    appends: list[tuple[int, int]] = field(init=False)
    """Row, its next page."""
    chunks: list[tuple[int, int]] = field(init=False)
    """Row, number of positions."""
    prefill_tokens: int = 0
    """Number of positions of `chunks`."""
    fresh: list[int] = field(init=False)
    """Rows started in this plan that have a single position left, so they are decode rows."""
    swap_outs: list[tuple[int, int, bytes]] = field(init=False)
    """Page, host page, hash."""
    copies: list[tuple[int, int, int]] = field(init=False)
    """Source page, target page, number of tokens."""
    swap_ins: list[tuple[int, int]] = field(init=False)
    """Host page, page."""
    cached: list[tuple[int, bytes]] = field(init=False)
    """Page, hash: pages that this plan fills and that are in the prefix cache from now on."""
    _logit_rows: int | None = None

    def __post_init__(self) -> None:
        self.budget = self.lane.memory.token_budget
        self.starts, self.appends, self.chunks, self.fresh = [], [], [], []  # a fifth of the time of factories
        self.swap_outs, self.copies, self.swap_ins, self.cached = [], [], [], []

    def logit_rows_left(self) -> int:
        """Returns how many logit rows the step has left for prompt logprobs. Most plans do without them.

        One is reserved for each running or waiting request that may sample. Admission and preemption do not change
        their sum. With `chunk_align` left, a chunk of any prompt fits.
        """
        if self._logit_rows is None:
            info, rows = self.lane.info, self.lane.rows
            self._logit_rows = info.logit_rows - min(info.max_rows, rows.num_seated + self.queue.num_waiting)
        return self._logit_rows

    def take_logit_rows(self, request: Request, start: int, count: int) -> int:
        """Takes the logit rows for a chunk of up to `count` positions from `start` on.

        Returns the number of positions for which they suffice: `count`, or a smaller multiple of `chunk_align`.
        """
        left, align, end = self.logit_rows_left(), self.lane.info.chunk_align, start + count
        wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, end)
        if len(wanted) > left:
            # The chunk ends at the position that takes the last logit row.
            count = (wanted.start + left - 1 - start) // align * align
            wanted = wanted_positions(request.prompt_logprobs_from, request.prompt_tokens, start, start + count)
        self._logit_rows = left - len(wanted)
        return count

    # Rows ----------------------------------------------------------------------------------------------------------

    def seat(self, request: Request, matched: PrefixMatch, end: int) -> int:
        """Seats a request with pages for its positions before `end`. Enough pages must be unused. Returns the row."""
        lane, queue = self.lane, self.queue
        queue.take(request, self.now)
        if request.admitted(self.now, first_position=matched.first_position):
            self.counters.admitted(request.prompt_tokens, request.cached_prompt_tokens)
        for page in matched.shared:
            lane.pool.share(page)
        allocated = lane.pages.allocate(lane.pages_for(end) - len(matched.pages) + matched.num_loaded)
        assert allocated is not None, f"request {request.submit.request_id} was seated without pages"
        unused = iter(allocated)
        pages: list[int] = []
        for page_idx, page in enumerate(matched.pages):
            match page:
                case HostPage():
                    pages.append(next(unused))
                    self._swap_in(pages[-1], page, request.page_hashes[page_idx])
                case None:
                    pages.append(0)
                case _:
                    pages.append(page)
        pages += unused
        first = matched.first_position
        if matched.fork is not None:
            source, num_tokens = matched.fork
            self.copies.append((source, pages[len(matched.pages)], num_tokens))
        held_from = lane.first_seen_page(first) if None in matched.pages else 0
        reader = self.frontends.get(request.frontend, DETACHED)
        row = lane.seat(request, pages, reader, first_position=first, held_from=held_from)
        if not may_sample(lane, request):
            lane.rows.await_needs(row, True)
        self.starts.append(_start(request, row, pages, first))
        self.bytes_left -= start_bytes(request, len(pages))
        return row

    def has_bytes_for(self, request: Request, num_pages: int) -> bool:
        """Returns whether the plan stays within its size if it starts the request. One row is always allowed."""
        return not self.starts or start_bytes(request, num_pages) <= self.bytes_left

    def _swap_in(self, page: int, host_page: HostPage, page_hash: bytes) -> None:
        self.swap_ins.append((host_page.slot, page))
        self.lane.host.touch(page_hash)
        if self.lane.pool.cache(page, page_hash, host_page.tokens):
            self.cached.append((page, page_hash))

    def grow(self, row: int, num_tokens: int) -> bool:
        """Allocates pages for the row's first `num_tokens` positions. Returns False if too few pages are left."""
        rows = self.lane.rows
        missing = self.lane.pages_for(num_tokens) - int(rows.num_pages[row])
        if missing <= 0:
            return True
        pages = self.lane.pages.allocate(missing)
        if pages is None:
            return False
        for page in pages:
            rows.append_page(row, page)
            self.appends.append((row, page))
        return True

    def grow_by_one(self, crossing: list[int]) -> bool:
        """Allocates the next page of each row in `crossing`. Returns False, without change, if too few are left."""
        pages = self.lane.pages.allocate(len(crossing))
        if pages is None:
            return False
        self.lane.rows.append_pages(crossing, pages)
        self.appends += zip(crossing, pages, strict=True)
        return True

    def preempt(self, victim: Request) -> None:
        """Takes the row from a running request and queues the request again. Swaps out its pages if `swapping_pays`."""
        lane = self.lane
        self.counters.preemptions += 1
        lane.schedule.has_preempted = True
        self.has_preempted = True
        # The worker swaps out first, so a swap-out could overwrite a host page that this plan swaps in. A plan with
        # swap-ins therefore gets no swap-outs.
        if not self.swap_ins and swapping_pays(lane.info):
            self.swap_outs += swap_out(lane, victim, len(self.swap_outs))
        lane.unseat(victim, Move.PREEMPT)
        self.queue.enqueue(victim)

    def restart(self) -> None:
        """Resets the budgets after a preemption freed pages. Until now the plan contains only preemptions."""
        assert not (self.chunks or self.starts or self.appends or self.fresh), "the plan is not empty"
        self.budget, self._logit_rows, self.has_preempted = self.lane.memory.token_budget, None, False

    # Work ----------------------------------------------------------------------------------------------------------

    def chunk(self, row: int, start: int, count: int) -> None:
        """Plans that the row computes `count` positions from `start` on, and caches the pages that they fill.

        A request with the same prefix may share these pages in the same step, because each layer writes keys and
        values before it attends.
        """
        lane = self.lane
        align = lane.info.chunk_align
        self.chunks.append((row, count))
        self.prefill_tokens += count
        self.budget -= -(-count // align) * align
        if start + count == lane.rows.known[row]:
            # What may still join this step is limited, because a prompt ends in it and its caller waits for a token.
            self.budget = min(self.budget, ending_budget(lane.info, self.prefill_tokens))
        request, page_size = lane.rows.request_at(row), lane.info.page_size
        if not request.submit.cache_write or request.weights.keeps_pages:
            return
        pages, hashes, pool = lane.rows.pages[row], request.page_hashes, lane.pool
        for page_idx in range(start // page_size, min((start + count) // page_size, len(hashes))):
            page, page_hash = pages[page_idx], hashes[page_idx]
            if pool.page_with_hash(page_hash):
                continue
            if pool.cache(page, page_hash, request.page_tokens(page_idx, page_size)):
                self.cached.append((page, page_hash))

    def decode_at_once(self, row: int) -> None:
        """Plans a decode position for a row that this plan starts: only its last known token is left to compute."""
        self.fresh.append(row)
        self.budget -= 1


def _start(request: Request, row: int, pages: list[int], first_position: int) -> RowStart:
    return RowStart(
        row=row,
        tokens=request.tokens_between(0, request.known),
        pages=np.array(pages, np.int32),
        first_position=first_position,
        num_prompt_tokens=request.prompt_tokens,
        sampling=request.submit.sampling,
        sample_idx=request.sample_idx,
        banned_until=request.prompt_tokens + request.submit.min_new_tokens,
        banned=request.banned,
        num_logprobs=request.submit.num_logprobs,
        prompt_logprobs_from=request.prompt_logprobs_from,
        constraint=request.constraint,
        other_needs=request.other_needs,
    )
