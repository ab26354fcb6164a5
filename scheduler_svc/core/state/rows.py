"""The rows of one worker: hot state of whatever runs, as arrays, and the checksum of the worker's tables.

Owns every running request's counters, page list and the tail of its tokens. Knows nothing of queues or policy.

Counters per row (positions and tokens are counted from the start of the sequence):

    confirmed <= planned <= known + samples

`known` token ids held by the core, `planned` positions in sent plans, `confirmed` positions in received results,
`samples` tokens that plans in flight will bring, `proven` positions whose keys and values are finite, because a later
finite sample read them. A row has work while planned < min(known + samples, last). `sealed` full pages are proven; the
row's next is when `proven` reaches `cache_at`. With a window a finite sample has not read all that was computed in
its step: positions from `verified_from` on are proven, those before it nobody knows.

With a window the row no longer holds the pages that nothing of it reads: those from the lane's sink pages on and before
`held_from`. Its page list still names them, as the worker's table does.

`prompt_logprobs_from` is what the worker was told when the row was started; how far they were told since, the request
knows.

A row that its request left keeps `planned` and its page sum: the worker is not told of ends, so its tables keep them
too, and the checksum (worker.proto) covers every row started in the generation.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.state.request import Request

# Tokens a row gathers before they move to its request: one short loop per so many steps instead of one per step.
TAIL = 64

_MASK = (1 << 64) - 1
_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_POSITION_TAG = 0xFFFFF


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea, Flood 2014), elementwise, modulo 2^64."""
    z = x + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


def mix_one(x: int) -> int:
    """`mix` of one number; twenty times faster than an array of one."""
    z = x + _GAMMA & _MASK
    z = (z ^ z >> 30) * _MIX1 & _MASK
    z = (z ^ z >> 27) * _MIX2 & _MASK
    return z ^ z >> 31


class Rows:
    """Rows 1 to `max_rows`; row 0 is reserved and never seated."""

    def __init__(self, max_rows: int, page_size: int = TAIL) -> None:
        """`page_size` only tells how many tokens to gather."""
        n = max_rows + 1
        self.max_rows = max_rows
        self.num_seated = 0
        # Seated rows that want logprobs: where it is 0, nobody looks any further.
        self.num_with_logprobs = 0
        # Positions that the seated rows had left when they were seated, together: no less than they have now.
        self.remaining_bound = 0
        # Lowest first, so that what runs stays packed at the front.
        self._free = list(range(max_rows, 0, -1))
        self.requests: list[Request | None] = [None] * n
        self.pages: list[list[int]] = [[] for _ in range(n)]
        self.handle = np.zeros(n, np.int64)
        self.known = np.zeros(n, np.int32)
        self.planned = np.zeros(n, np.int32)
        self.confirmed = np.zeros(n, np.int32)
        self.tokens_in_flight = np.zeros(n, np.int32)
        self.verified = np.zeros(n, np.int32)
        self.plans_in_flight = np.zeros(n, np.int32)
        self.num_cached = np.zeros(n, np.int32)
        self.cache_at = np.zeros(n, np.int32)
        self.verified_from = np.zeros(n, np.int32)
        self._remaining_when_seated = [0] * n
        self.num_pages = np.zeros(n, np.int32)
        self.held_from = np.zeros(n, np.int32)
        self.last = np.zeros(n, np.int32)
        self.prompt = np.zeros(n, np.int32)
        self.total = np.zeros(n, np.int32)
        self.min_known = np.zeros(n, np.int32)
        self.stream = np.zeros(n, np.uint64)
        self.frontend_idx = np.zeros(n, np.int32)
        self.ignore_eos = np.zeros(n, np.bool_)
        self.has_stops = np.zeros(n, np.bool_)
        self.num_logprobs = np.zeros(n, np.int32)
        self.prompt_logprobs_from = np.zeros(n, np.int32)
        # Whole pages where they are small, so that a full page's tokens are in one piece.
        self._width = -(-TAIL // page_size) * page_size if page_size <= 4 * TAIL else TAIL
        self._tail = np.zeros((n, self._width), np.int32)
        self._flushed = np.zeros(n, np.int32)
        self._weight = mix(np.arange(n, dtype=np.uint64) << np.uint64(40) ^ np.uint64(_POSITION_TAG)) | np.uint64(1)
        self._page_sum = np.zeros(n, np.uint64)
        self._checksum = 0

    @property
    def checksum(self) -> int:
        """Of the worker's tables once it has applied everything told so far."""
        return self._checksum

    @property
    def num_free(self) -> int:
        """Rows nobody sits in."""
        return len(self._free)

    def seated(self) -> npt.NDArray[np.int64]:
        """Rows in use, ascending."""
        return np.flatnonzero(self.handle)

    def page_sum(self, row: int) -> int:
        """The row's pages' part of the checksum; an ended row keeps its own."""
        return int(self._page_sum[row])

    def request_at(self, row: int) -> Request:
        """Who sits there; somebody must."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def requests_at(self, rows: npt.NDArray[np.int64]) -> list[Request]:
        """Who sits in these rows, all of them taken."""
        return [self.request_at(row) for row in rows.tolist()]

    def seat(
        self, request: Request, pages: list[int], frontend_idx: int, *, first_position: int, held_from: int
    ) -> int:
        """Gives the request a row with its pages, filled before `first_position`; returns the row."""
        row = self._free.pop()
        self.num_seated += 1
        known = request.known
        self.requests[row] = request
        self.pages[row] = pages
        self.handle[row] = request.handle
        self.known[row] = self._flushed[row] = known
        self.tokens_in_flight[row] = self.plans_in_flight[row] = self.verified[row] = self.num_cached[row] = 0
        self.confirmed[row] = first_position
        self.cache_at[row] = 1
        self.verified_from[row] = 0
        self.num_pages[row] = len(pages)
        self.held_from[row] = held_from
        self.last[row] = request.last_position
        self.prompt[row] = request.prompt_tokens
        self.total[row] = request.total_length
        self.min_known[row] = request.prompt_tokens + request.min_new_tokens
        self.stream[row] = request.stream
        self.frontend_idx[row] = frontend_idx
        self.ignore_eos[row] = request.ignore_eos
        self.has_stops[row] = bool(request.stop_token_ids)
        self.num_logprobs[row] = request.num_logprobs
        self.prompt_logprobs_from[row] = request.prompt_logprobs_from
        self.num_with_logprobs += self._has_logprobs(row)
        self._remaining_when_seated[row] = request.last_position - known
        self.remaining_bound += self._remaining_when_seated[row]
        self._replace_table(row, pages, first_position)
        request.row = row
        return row

    def unseat(self, row: int) -> list[int]:
        """Takes the request out, its tokens and counts of what is in flight with it; returns the pages it held."""
        request = self.request_at(row)
        first = int(self._flushed[row]) % self._width
        request.add_outputs(self._tail[row, first : first + int(self.known[row] - self._flushed[row])].copy())
        request.pending_plans = int(self.plans_in_flight[row])
        request.pending_tokens = int(self.tokens_in_flight[row])
        request.row = 0
        self.requests[row] = None
        self.handle[row] = 0
        self.num_seated -= 1
        self.remaining_bound -= self._remaining_when_seated[row]
        self.num_with_logprobs -= self._has_logprobs(row)
        self._free.append(row)
        pages, self.pages[row] = self.pages[row], []
        return pages

    def append_page(self, row: int, page: int) -> None:
        """Gives the row its next page."""
        pages = self.pages[row]
        term = mix_one(row << 40 ^ len(pages) << 20 ^ page)
        pages.append(page)
        self.num_pages[row] += 1
        self._page_sum[row] = (int(self._page_sum[row]) + term) & _MASK
        self._checksum = (self._checksum + term) & _MASK

    def append_pages(self, to: list[int], pages: list[int]) -> None:
        """Gives each of these rows, no row twice, its next page."""
        if len(pages) < 4:
            for row, page in zip(to, pages, strict=True):
                self.append_page(row, page)
            return
        rows = np.array(to, np.int64)
        idx = self.num_pages[rows].astype(np.uint64)
        terms = mix(rows.astype(np.uint64) << np.uint64(40) ^ idx << np.uint64(20) ^ np.array(pages, np.uint64))
        self.num_pages[rows] += 1
        self._page_sum[rows] += terms
        self._checksum = (self._checksum + int(terms.sum())) & _MASK
        tables = self.pages
        for row, page in zip(to, pages, strict=True):
            tables[row].append(page)

    def plan(self, rows: npt.NDArray[np.int64], counts: Int32Array, sampled: npt.NDArray[np.int64]) -> None:
        """A plan computes `counts[i]` positions of `rows[i]`, no row twice, and samples `rows[sampled]`."""
        self.planned[rows] += counts
        self.plans_in_flight[rows] += 1
        self.tokens_in_flight[rows[sampled]] += 1
        moved = (self._weight[rows] * counts.astype(np.uint64)).sum()
        self._checksum = (self._checksum + int(moved)) & _MASK

    def confirm(self, rows: npt.NDArray[np.int64], ends: Int32Array) -> None:
        """A plan that computed the positions before `ends[i]` of `rows[i]` was answered; no row twice."""
        self.confirmed[rows] = ends
        self.plans_in_flight[rows] -= 1

    def drop_sampled(self, rows: npt.NDArray[np.int64]) -> None:
        """The tokens that an answered plan brought for these rows are not used."""
        self.tokens_in_flight[rows] -= 1

    def add_sampled(self, rows: npt.NDArray[np.int64], tokens: Int32Array) -> Int32Array:
        """Appends the token that an answered plan brought for each of `rows`, no row twice.

        The token is finite, so every confirmed position is. Returns int32[rows], the positions proven finite.
        """
        self.tokens_in_flight[rows] -= 1
        proven = self.confirmed[rows]
        self.verified[rows] = proven
        self.add_tokens(rows, tokens)
        return proven

    def add_tokens(self, rows: npt.NDArray[np.int64], tokens: Int32Array) -> None:
        """Appends one token to each of `rows`, no row twice."""
        width, known = self._width, self.known[rows]
        used = known % width
        self._tail[rows, used] = tokens
        known += 1
        self.known[rows] = known
        for row in rows[used == width - 1].tolist():
            flushed = int(self._flushed[row])
            self.request_at(row).add_outputs(self._tail[row, flushed % width :].copy())
            self._flushed[row] = flushed - flushed % width + width

    def tokens_between(self, row: int, start: int, end: int) -> Int32Array:
        """int32[end - start] of what the row knows, its newest tokens included."""
        request, flushed = self.request_at(row), int(self._flushed[row])
        if end <= flushed:
            return request.tokens_between(start, end)
        first = flushed % self._width
        tail = self._tail[row, first + max(0, start - flushed) : first + end - flushed]
        return tail if start >= flushed else np.concatenate([request.tokens_between(start, flushed), tail])

    def _has_logprobs(self, row: int) -> bool:
        return bool(self.num_logprobs[row] or self.prompt_logprobs_from[row])

    def _replace_table(self, row: int, pages: list[int], first_position: int) -> None:
        weight = int(self._weight[row])
        old = int(self.planned[row]) * weight + int(self._page_sum[row])
        index = np.arange(len(pages), dtype=np.uint64) << np.uint64(20)
        words = np.array(pages, np.uint64) ^ index ^ np.uint64(row << 40)
        page_sum = int(mix(words).sum()) & _MASK
        self._page_sum[row] = page_sum
        new = first_position * weight + page_sum
        self._checksum = (self._checksum - old + new) & _MASK
        self.planned[row] = first_position
