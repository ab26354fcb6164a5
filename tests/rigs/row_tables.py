"""Rows, their page lists, the owners of pages, and the checksum over them.

Owns the executor's view of a generation: which rows were started, with which tokens, pages and next position. Names to
the pool the pages that are given out, and knows nothing of what they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.rigs.hashing import MASK, ROOT, extend, mix
from tests.rigs.page_pool import PagePool
from tests.rigs.plan_arrays import PlanError, StartedRow
from tests.rigs.shape import Shape
from tests.rigs.toy_constraints import Matcher, ToyConstraint


def _page_term(row: int, logical_idx: int, page: int) -> int:
    return mix((row << 40) ^ (logical_idx << 20) ^ page)


def _position_weight(row: int) -> int:
    return mix((row << 40) ^ 0xFFFFF) | 1


def table_checksum(tables: dict[int, tuple[int, list[int]]]) -> int:
    """worker.proto's checksum from scratch; row → (next position, page list)."""
    total = 0
    for row, (position, pages) in tables.items():
        total += position * _position_weight(row)
        total += sum(_page_term(row, i, page) for i, page in enumerate(pages))
    return total & MASK


@dataclass(slots=True, kw_only=True)
class Row:
    """A row in full. tokens: int32[max_length + 1], of which num_tokens are held."""

    idx: int
    tokens: np.ndarray
    num_tokens: int
    # uint64[max_length + 2]: of the first n tokens, filled up to `num_hashed`.
    hashes: np.ndarray
    num_hashed: int = 0
    pages: np.ndarray
    # Which giving-out of each page it was that the row came by.
    gifts: np.ndarray
    num_pages: int
    position: int
    started: StartedRow
    # Of all that shapes its draws, and what a bias of minus infinity bans.
    key: int
    never: frozenset[int]
    # Follows the output; None without a constraint.
    matcher: Matcher | None = None
    page_set: set[int] = field(default_factory=set)
    # The hashes as all weights would have them; None while they are the same.
    plain: np.ndarray | None = None
    page_terms: int = 0

    def hash_up_to(self, length: int, salt: int = 0) -> None:
        """Fills in the hashes of the first `length` tokens; those that are new with this salt of the weights."""
        if salt and self.plain is None:
            self.plain = self.hashes.copy()
        if self.plain is not None:
            history = int(self.plain[self.num_hashed])
            for n in range(self.num_hashed, length):
                history = extend(history, int(self.tokens[n]))
                self.plain[n + 1] = history
        history = int(self.hashes[self.num_hashed])
        for n in range(self.num_hashed, length):
            history = extend(history, int(self.tokens[n]), salt)
            self.hashes[n + 1] = history
        self.num_hashed = max(self.num_hashed, length)


class RowTables:
    """The rows of one generation. `reset` begins the next.

    A page is a row's own from being given to it (a start's pages from its first position on, an append) until it is
    given out again, loaded or copied over. The pages before a start's first position are others', or filled by a move.
    """

    def __init__(self, shape: Shape, pool: PagePool, constraints: Mapping[bytes, ToyConstraint]) -> None:
        """`constraints` are those that the core has sent and not dropped."""
        self._constraints = constraints
        self._shape = shape
        self._pool = pool
        self.rows: dict[int, Row] = {}
        # How often each page was given out or filled again, and the last row that got it; -1: a copy or a load did.
        self._gifts = np.zeros(shape.num_pages, np.int64)
        self._owner = [0] * shape.num_pages

    def reset(self) -> None:
        """Drops every row; a new generation starts with no tables."""
        self.rows.clear()

    def checksum(self) -> int:
        total = 0
        for row in self.rows.values():
            total += row.position * _position_weight(row.idx) + row.page_terms
        return total & MASK

    def row(self, idx: int) -> Row:
        """A row that was started in this generation."""
        found = self.rows.get(idx)
        if found is None:
            raise PlanError(f"row {idx} was never started in this generation")
        return found

    def apply(self, started: list[StartedRow], appends: list[tuple[int, int]], filled: set[int]) -> None:
        """A plan's rows and page lists, after its moves; `filled` are the pages that copies and loads filled."""
        if len({one.row for one in started}) != len(started):
            raise PlanError("a row is started twice in one plan")
        for page in filled:
            self._gifts[page] += 1
            self._owner[page] = -1
        for one in started:
            self._start(one, filled)
        for idx, page in appends:
            self._append(self.row(idx), page, 0)
        # A row that computes a page may be started behind the one that shares it.
        for one in started:
            row, num_shared = self.rows[one.row], one.first_position // self._shape.page_size
            pages = row.pages[:num_shared]
            row.gifts[:num_shared] = np.where(pages > 0, self._gifts[pages], -1)

    def _start(self, started: StartedRow, filled: set[int]) -> None:
        self._check_start(started)
        shape, idx, num_tokens = self._shape, started.row, len(started.tokens)
        tokens = np.zeros(shape.max_length + 1, dtype=np.int32)
        tokens[:num_tokens] = started.tokens
        hashes = np.zeros(shape.max_length + 2, dtype=np.uint64)
        hashes[0] = ROOT
        row = Row(
            idx=idx,
            tokens=tokens,
            num_tokens=num_tokens,
            hashes=hashes,
            pages=np.zeros(shape.max_row_pages, dtype=np.int64),
            gifts=np.zeros(shape.max_row_pages, dtype=np.int64),
            num_pages=0,
            position=started.first_position,
            started=started,
            key=started.settings.key(started.num_prompt_tokens),
            never=started.settings.banned(),
            matcher=self._matcher(started),
        )
        self.rows[idx] = row
        num_shared, slot = divmod(started.first_position, shape.page_size)
        for logical_idx, page in enumerate(started.pages):
            if logical_idx < num_shared:
                self._list(row, page, behind=shape.is_behind(logical_idx, started.first_position))
            else:
                self._append(row, page, slot if logical_idx == num_shared and page in filled else 0)

    def _matcher(self, started: StartedRow) -> Matcher | None:
        if not started.constraint:
            return None
        constraint = self._constraints.get(started.constraint)
        if constraint is None:
            raise PlanError(f"row {started.row} has a constraint that was not sent, or was dropped")
        return (
            None if constraint.is_refused else Matcher(constraint, started.tokens[started.num_prompt_tokens :].tolist())
        )

    def _check_start(self, started: StartedRow) -> None:
        idx, num_tokens = started.row, len(started.tokens)
        if not 1 <= idx <= self._shape.max_rows:
            raise PlanError(f"started row {idx} is outside 1 … {self._shape.max_rows}")
        if not 1 <= num_tokens <= self._shape.max_length:
            raise PlanError(f"row {idx} starts with {num_tokens} tokens, outside 1 … {self._shape.max_length}")
        if int(started.tokens.min()) < 0 or int(started.tokens.max()) >= self._shape.vocab_size:
            raise PlanError(f"row {idx} starts with a token outside 0 … {self._shape.vocab_size - 1}")
        if not 0 <= started.first_position < num_tokens:
            raise PlanError(f"row {idx} starts at {started.first_position} with {num_tokens} tokens")
        if started.first_position > len(started.pages) * self._shape.page_size:
            raise PlanError(f"row {idx} starts at {started.first_position} beyond its pages")
        for what, tokens in (
            ("bans", started.banned),
            ("biases", [token for token, _ in started.settings.biases]),
            ("allows", started.settings.allowed),
        ):
            if any(not 0 <= token < self._shape.vocab_size for token in tokens):
                raise PlanError(f"row {idx} {what} a token outside 0 … {self._shape.vocab_size - 1}")
        prompt = started.num_prompt_tokens
        if not 1 <= prompt <= num_tokens:
            raise PlanError(f"row {idx} starts with {num_tokens} tokens, of which {prompt} are its prompt")
        if started.prompt_logprobs_from and not 1 <= started.prompt_logprobs_from < prompt:
            raise PlanError(f"row {idx} wants logprobs from {started.prompt_logprobs_from} of a prompt of {prompt}")
        if started.prompt_logprobs_from and num_tokens > prompt:
            raise PlanError(f"row {idx} has output already and wants its prompt's logprobs")

    def _append(self, row: Row, page: int, first_slot: int) -> None:
        """One more page at the end of a row's list, which is the row's own from `first_slot` on."""
        self._list(row, page)
        self._pool.give(row.idx, page, first_slot)
        self._gifts[page] += 1
        self._owner[page] = row.idx
        row.gifts[row.num_pages - 1] = self._gifts[page]

    def _list(self, row: Row, page: int, *, behind: bool = False) -> None:
        num_pages, logical_idx = self._shape.num_pages, row.num_pages
        if page == 0 and not behind:
            raise PlanError(f"row {row.idx} was given page 0, which is reserved for padding")
        if not 0 <= page < num_pages:
            raise PlanError(f"row {row.idx} was given page {page}, outside 1 … {num_pages - 1}")
        # A page behind the window may come back at the end of the same row.
        if page in row.page_set and not self._shape.window:
            raise PlanError(f"row {row.idx} was given page {page} twice")
        if logical_idx == self._shape.max_row_pages:
            raise PlanError(f"row {row.idx} was given more than {logical_idx} pages, and can never use so many")
        row.page_terms += _page_term(row.idx, logical_idx, page)
        row.pages[logical_idx] = page
        # Page 0 was never given out.
        row.gifts[logical_idx] = -1
        row.num_pages += 1
        row.page_set.add(page)

    def check_access(self, row: Row, start: int, count: int) -> None:
        """The row may read what its queries at these positions see, and has pages of its own to write them to."""
        shape, end = self._shape, start + count
        if end > shape.max_length:
            raise PlanError(f"row {row.idx} computes position {end - 1} of at most {shape.max_length}")
        if end > row.num_pages * shape.page_size:
            raise PlanError(
                f"row {row.idx} computes position {end - 1} with {row.num_pages} pages of {shape.page_size}"
            )
        size, num_used = shape.page_size, (end - 1) // shape.page_size + 1
        first = shape.first_read(start) // size
        if first:
            num_sinks = -(-min(shape.sink_tokens, start) // size)
            self._check_gifts(row, slice(0, min(num_sinks, first)))
        self._check_gifts(row, slice(first, num_used))

    def _check_gifts(self, row: Row, span: slice) -> None:
        pages = row.pages[span]
        wrong = np.flatnonzero(self._gifts[pages] != row.gifts[span])
        if not len(wrong):
            return
        page = int(pages[wrong[0]])
        if page == 0:
            raise PlanError(f"row {row.idx} uses its page {span.start + int(wrong[0])}, which it does not have")
        owner = self._owner[page]
        whose = "was copied or loaded over" if owner < 0 else f"belongs to row {owner}"
        raise PlanError(f"row {row.idx} uses page {page}, which {whose} since")
