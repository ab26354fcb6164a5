"""The rows of one worker: the state of its running requests as arrays, and the checksum of the worker's row tables.

A running request is seated in a row. Its counters, its page list and its newest tokens are here, indexed by row, so
that a step of 1,024 rows takes only a few array operations.

**Counters.** They count tokens or positions from the start of the sequence:

    known               tokens that the core has, prompt and output
    tokens_in_flight    further tokens, which plans in flight will sample
    planned             positions that were cached when the row was seated, and those in plans sent so far
    confirmed           the same cached positions, and those with results that have arrived
    verified            positions with finite keys and values: a step that attended to them gave finite logits
    last                position of the last token here, which is sampled but never computed

    verified <= confirmed <= planned <= min(known + tokens_in_flight, last)

While planned < min(known + tokens_in_flight, last), a row can be planned: one position is a decode, more are a chunk.

**Full pages.** `num_cached` is the number of full pages that `cache_full_pages` has processed. The function is called
again when `verified` reaches `cache_at`. If the worker has a window, the row's first sampled token attends only to its
window, so the positions before `verified_from` are never verified.

**Room.** A request with an unset maximum runs on any worker that holds its next token. If the worker has less room than
`Request.total_length`, `total` and `last` are those of the longest sequence that it holds.

**Window.** The row has released the pages with logical index from `sink_pages` (`Lane`) to `held_from - 1`.

**Checksum.** It is updated with every change and sent with every plan, so that the worker can check its own tables
(worker.proto has the formula). The worker does not learn that a row became free and keeps its entry. So `planned` and
the page sum of a free row stay until the row is seated again.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array, Int64Array, RowIndex
from scheduler_svc.core.state.request import Request
from tandem_contract.row_checksum import MASK_64, mix, mix_one, row_weights

# A row's new tokens collect in `_tail` until it is full, so the loop over requests runs once in about 64 steps.
TAIL_TOKENS = 64

_ANY = (1 << 31) - 1
_MANY_PAGES = 16  # from here on, array operations take less time than a loop


class Rows:
    """Rows 1 to `max_rows`. Row 0 is reserved for the positions that pad a step and is never seated."""

    def __init__(self, max_rows: int, page_size: int = TAIL_TOKENS, longest: int = _ANY) -> None:
        """Makes free rows. `page_size` affects only how many new tokens collect in a row.

        `longest` is the length of the longest sequence that the worker holds.
        """
        self.max_rows, self._longest, n = max_rows, longest, max_rows + 1
        self.num_seated = 0
        self.num_with_logprobs = 0
        """Number of seated rows with logprobs. If it is 0, planning does nothing for logprobs."""
        self.num_constrained = self.num_awaiting = 0
        """Numbers of seated rows with a constraint, and of those that must not sample yet (`awaits_needs`)."""
        self.remaining_bound = 0
        """Upper bound on the sum of `expected` over the seated rows: the sum at the times when they were seated."""
        # The next row is the lowest, so that seated rows stay dense.
        self._free = list(range(max_rows, 0, -1))
        self.requests: list[Request | None] = [None] * n
        self.pages: list[list[int]] = [[] for _ in range(n)]
        # 0 if the row is free.
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
        self._most_expected = np.full(n, _ANY, np.int32)
        # The account that is charged for each token as it comes, 0 for none.
        self.meter = np.zeros(n, np.int32)
        self.num_metered = 0
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
        self.is_constrained = np.zeros(n, np.bool_)
        # Whether the worker has not prepared all that the row needs, so that the row must not sample.
        self.awaits_needs = np.zeros(n, np.bool_)
        # If pages are small, the width is a multiple of their size, so that the tokens of a full page are contiguous.
        self._width = -(-TAIL_TOKENS // page_size) * page_size if page_size <= 4 * TAIL_TOKENS else TAIL_TOKENS
        self._tail = np.zeros((n, self._width), np.int32)
        self._flat_tail = self._tail.reshape(-1)
        # Tokens that are in the row's request. The later ones are in `_tail`, at their position modulo `_width`.
        self._flushed = np.zeros(n, np.int32)
        self._weight = row_weights(n)
        self._page_sum = [0] * n  # modulo 2^64; a list, because most changes are of a few rows
        self.checksum = 0
        """Checksum of the worker's row tables after all changes so far."""
        self.ones = np.ones(n, np.int32)
        """A one for each row: the numbers of positions of decode rows. It never changes."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def seated(self) -> npt.NDArray[np.int64]:
        """Returns the seated rows, ascending."""
        return self.handle.nonzero()[0]

    def page_sum(self, row: int) -> int:
        """Returns what the row's pages contribute to the checksum. A free row keeps the value of its last request."""
        return self._page_sum[row]

    def request_at(self, row: int) -> Request:
        """Returns the request in a seated row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def requests_at(self, rows: npt.NDArray[np.int64]) -> list[Request]:
        """Returns the requests in these seated rows."""
        return [self.request_at(row) for row in rows.tolist()]

    def seat(
        self, request: Request, pages: list[int], frontend_idx: int, *, first_position: int, held_from: int
    ) -> int:
        """Seats the request in a free row and returns the row.

        The list `pages` becomes the row's page list. The pages hold the keys and values of the positions before
        `first_position`.
        """
        row = self._free.pop()
        self.num_seated += 1
        known = request.known
        self.requests[row] = request
        self.pages[row] = pages
        self.handle[row] = request.handle
        self.known[row] = self._flushed[row] = known
        self.tokens_in_flight[row] = self.plans_in_flight[row] = self.verified[row] = self.num_cached[row] = 0
        self.confirmed[row], self.cache_at[row], self.verified_from[row] = first_position, 1, 0
        self.num_pages[row], self.held_from[row] = len(pages), held_from
        total = min(request.total_length, self._longest)
        self.total[row], self.last[row], self.prompt[row] = total, total - 1, request.prompt_tokens
        submit = request.submit
        self._most_expected[row] = submit.expected(_ANY)
        self.meter[row] = request.meter
        self.num_metered += bool(request.meter)
        self.min_known[row] = request.prompt_tokens + submit.min_new_tokens
        self.attach(row, request.stream, frontend_idx)
        self.ignore_eos[row] = submit.ignore_eos
        self.has_stops[row] = bool(request.stops)
        self.num_logprobs[row] = submit.num_logprobs
        self.prompt_logprobs_from[row] = request.prompt_logprobs_from
        self.num_with_logprobs += self._has_logprobs(row)
        self.is_constrained[row] = is_constrained = bool(request.constraint)
        self.num_constrained += is_constrained
        self._remaining_when_seated[row] = submit.expected(total - 1 - known)
        self.remaining_bound += self._remaining_when_seated[row]
        self._replace_table(row, pages, first_position)
        request.row = row
        return row

    def expected(self, rows: npt.NDArray[np.int64], begins: Int32Array) -> Int32Array:
        """Returns how many positions from `begins[i]` on `rows[i]` is expected to compute at most."""
        return np.minimum(self.last[rows] - begins, self._most_expected[rows])

    def attach(self, row: int, stream: int, frontend_idx: int) -> None:
        """Changes the reader of the row's output."""
        self.stream[row], self.frontend_idx[row] = stream, frontend_idx

    def await_needs(self, row: int, awaits: bool) -> None:
        """Sets whether the row of a request that needs a resource must not sample."""
        self.num_awaiting += awaits - int(self.awaits_needs[row])
        self.awaits_needs[row] = awaits

    def unseat(self, row: int) -> list[int]:
        """Removes the request from its row and returns the row's page list.

        The row's tokens and its numbers of plans and tokens in flight move to the request.
        """
        request = self.request_at(row)
        first = int(self._flushed[row]) % self._width
        request.add_outputs(self._tail[row, first : first + int(self.known[row] - self._flushed[row])].copy())
        request.pending_plans = int(self.plans_in_flight[row])
        request.pending_tokens = int(self.tokens_in_flight[row])
        request.row = 0
        self.requests[row], self.handle[row] = None, 0
        self.num_seated -= 1
        self.remaining_bound -= self._remaining_when_seated[row]
        self.num_metered -= bool(request.meter)
        self.num_with_logprobs -= self._has_logprobs(row)
        if request.needs:
            self.await_needs(row, False)
            self.num_constrained -= int(self.is_constrained[row])
        self._free.append(row)
        pages, self.pages[row] = self.pages[row], []
        return pages

    def append_page(self, row: int, page: int) -> None:
        """Appends a page to the row's page list."""
        pages = self.pages[row]
        term = mix_one(row << 40 ^ len(pages) << 20 ^ page)
        pages.append(page)
        self.num_pages[row] += 1
        self._page_sum[row] = (self._page_sum[row] + term) & MASK_64
        self.checksum = (self.checksum + term) & MASK_64

    def append_pages(self, rows: list[int], pages: list[int]) -> None:
        """Appends `pages[i]` to the page list of `rows[i]`. The rows are distinct."""
        if len(pages) < _MANY_PAGES:
            for row, page in zip(rows, pages, strict=True):
                self.append_page(row, page)
            return
        index = np.array(rows, np.int64)
        page_idx = self.num_pages[index].astype(np.uint64)
        terms = mix(index.astype(np.uint64) << np.uint64(40) ^ page_idx << np.uint64(20) ^ np.array(pages, np.uint64))
        self.num_pages[index] += 1
        self.checksum = (self.checksum + int(terms.sum())) & MASK_64
        tables, sums = self.pages, self._page_sum
        for row, page, term in zip(rows, pages, terms.tolist(), strict=True):
            tables[row].append(page)
            sums[row] = (sums[row] + term) & MASK_64

    def plan(self, rows: Int64Array, at: RowIndex, counts: Int32Array, sampled: Int64Array) -> Int32Array:
        """Records `counts[i]` positions of `rows[i]`, distinct, and a token of `rows[sampled]`; returns `planned`.

        at: `index_of(rows)`.
        """
        planned = self.planned[at] + counts
        self.planned[at] = planned
        self.plans_in_flight[at] += 1
        self.tokens_in_flight[at if len(sampled) == len(rows) else rows[sampled]] += 1
        moved = np.dot(self._weight[at], counts.astype(np.uint64))
        self.checksum = (self.checksum + int(moved)) & MASK_64
        return planned

    def confirm(self, at: RowIndex, ends: Int32Array) -> None:
        """Records the result of a plan that computed row `at[i]` up to `ends[i] - 1`. The rows are distinct."""
        self.confirmed[at] = ends
        self.plans_in_flight[at] -= 1

    def drop_sampled(self, rows: npt.NDArray[np.int64]) -> None:
        """Records that the result's tokens for these rows are not used."""
        self.tokens_in_flight[rows] -= 1

    def add_sampled(
        self, rows: npt.NDArray[np.int64], at: RowIndex, tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Appends the tokens of a result, `tokens[i]` to `rows[i]`. The rows are distinct and their logits were finite.

        at: `index_of(rows)`. Returns the numbers of verified positions (now all confirmed ones) and of known tokens,
        int32[len(rows)] each, which hold until the next change.
        """
        self.tokens_in_flight[at] -= 1
        verified = self.confirmed[at]
        self.verified[at] = verified
        width, before = self._width, self.known[at]
        used = before % width
        self._flat_tail[rows * width + used] = tokens  # half the time of two indices for many rows
        known = before + 1
        self.known[at] = known
        for row in rows[used == width - 1].tolist():
            flushed = int(self._flushed[row])
            self.request_at(row).add_outputs(self._tail[row, flushed % width :].copy())
            self._flushed[row] = flushed - flushed % width + width
        return verified, known

    def tokens_between(self, row: int, start: int, end: int) -> Int32Array:
        """Returns the row's tokens from `start` to `end - 1`, int32[end - start]. `end` is at most `known`."""
        request, flushed = self.request_at(row), int(self._flushed[row])
        if end <= flushed:
            return request.tokens_between(start, end)
        first = flushed % self._width
        tail = self._tail[row, first + max(0, start - flushed) : first + end - flushed]
        return tail if start >= flushed else np.concatenate([request.tokens_between(start, flushed), tail])

    def _has_logprobs(self, row: int) -> bool:
        return bool(self.num_logprobs[row] or self.prompt_logprobs_from[row])

    def _replace_table(self, row: int, pages: list[int], first_position: int) -> None:
        """Replaces what the row contributes to the checksum when it is seated again."""
        weight = int(self._weight[row])
        old = int(self.planned[row]) * weight + self._page_sum[row]
        if len(pages) < _MANY_PAGES:
            page_sum = sum(mix_one(row << 40 ^ i << 20 ^ page) for i, page in enumerate(pages)) & MASK_64
        else:
            index = np.arange(len(pages), dtype=np.uint64) << np.uint64(20)
            words = np.array(pages, np.uint64) ^ index ^ np.uint64(row << 40)
            page_sum = int(mix(words).sum()) & MASK_64
        self._page_sum[row] = page_sum
        new = first_position * weight + page_sum
        self.checksum = (self.checksum - old + new) & MASK_64
        self.planned[row] = first_position
