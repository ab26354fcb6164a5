"""Rows, their page lists, who owns a page, and the checksum over them.

Owns the executor's view of a generation: which rows were started, with which tokens, pages and next position.
Knows nothing of what the pages hold.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.rigs.hashing import MASK, mix
from tests.rigs.plan_arrays import PlanError, StartedRow


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
    pages: np.ndarray
    num_pages: int
    position: int
    started: StartedRow
    # Of all that shapes its draws, and what a bias of minus infinity bans.
    key: int
    never: frozenset[int]
    page_set: set[int] = field(default_factory=set)
    page_terms: int = 0
    # It produced values that are not finite, and so will whatever it computes from now on.
    nonfinite: bool = False


class RowTables:
    """The rows of one generation. `reset` begins the next."""

    def __init__(self, *, max_rows: int, num_pages: int, page_size: int, max_length: int, vocab_size: int) -> None:
        self._max_rows = max_rows
        self._num_pages = num_pages
        self._page_size = page_size
        self._max_length = max_length
        self._vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        # The row that may write a page: the one that was given it last.
        self._owner: dict[int, int] = {}
        # Pages that came filled to some row: never written again until given out anew.
        self._sealed: set[int] = set()

    def reset(self) -> None:
        """Drops every row; a new generation starts with no tables."""
        self.rows.clear()
        self._owner.clear()
        self._sealed.clear()

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

    def start(self, started: StartedRow) -> None:
        """Replaces a row in full."""
        idx, num_tokens = started.row, len(started.tokens)
        self._check_start(started)
        tokens = np.zeros(self._max_length + 1, dtype=np.int32)
        tokens[:num_tokens] = started.tokens
        row = Row(
            idx=idx,
            tokens=tokens,
            num_tokens=num_tokens,
            pages=np.zeros(self._num_pages, dtype=np.int64),
            num_pages=0,
            position=started.first_position,
            started=started,
            key=started.settings.key(started.num_prompt_tokens),
            never=started.settings.banned(),
        )
        self.rows[idx] = row
        num_filled = started.first_position // self._page_size
        for logical_idx, page in enumerate(started.pages):
            self._append(row, page, owned=logical_idx >= num_filled)

    def _check_start(self, started: StartedRow) -> None:
        idx, num_tokens = started.row, len(started.tokens)
        if not 1 <= idx <= self._max_rows:
            raise PlanError(f"started row {idx} is outside 1 … {self._max_rows}")
        if not 1 <= num_tokens <= self._max_length:
            raise PlanError(f"row {idx} starts with {num_tokens} tokens, outside 1 … {self._max_length}")
        if int(started.tokens.min()) < 0 or int(started.tokens.max()) >= self._vocab_size:
            raise PlanError(f"row {idx} starts with a token outside 0 … {self._vocab_size - 1}")
        if not 0 <= started.first_position < num_tokens:
            raise PlanError(f"row {idx} starts at {started.first_position} with {num_tokens} tokens")
        if started.first_position > len(started.pages) * self._page_size:
            raise PlanError(f"row {idx} starts at {started.first_position} beyond its pages")
        for what, tokens in (
            ("bans", started.banned),
            ("biases", [token for token, _ in started.settings.biases]),
            ("allows", started.settings.allowed),
        ):
            if any(not 0 <= token < self._vocab_size for token in tokens):
                raise PlanError(f"row {idx} {what} a token outside 0 … {self._vocab_size - 1}")
        prompt = started.num_prompt_tokens
        if not 1 <= prompt <= num_tokens:
            raise PlanError(f"row {idx} starts with {num_tokens} tokens, of which {prompt} are its prompt")
        if started.prompt_logprobs_from and not 1 <= started.prompt_logprobs_from < prompt:
            raise PlanError(f"row {idx} wants logprobs from {started.prompt_logprobs_from} of a prompt of {prompt}")
        if started.prompt_logprobs_from and num_tokens > prompt:
            raise PlanError(f"row {idx} has output already and wants its prompt's logprobs")

    def append(self, idx: int, page: int) -> None:
        """One more page at the end of a row's list."""
        self._append(self.row(idx), page, owned=True)

    def _append(self, row: Row, page: int, *, owned: bool) -> None:
        if page == 0:
            raise PlanError(f"row {row.idx} was given page 0, which is reserved for padding")
        if not 0 < page < self._num_pages:
            raise PlanError(f"row {row.idx} was given page {page}, outside 1 … {self._num_pages - 1}")
        if page in row.page_set:
            raise PlanError(f"row {row.idx} was given page {page} twice")
        row.page_terms += _page_term(row.idx, row.num_pages, page)
        row.pages[row.num_pages] = page
        row.num_pages += 1
        row.page_set.add(page)
        if owned:
            self._owner[page] = row.idx
            self._sealed.discard(page)

    def owned_pages(self, row: Row) -> list[int]:
        """Those of the row's pages that nobody else was given since."""
        return [page for page in row.pages[: row.num_pages].tolist() if self._owner.get(page) == row.idx]

    def check_write(self, row: Row, start: int, count: int) -> None:
        """The row may write these positions: they have pages, and nobody else was given or reads them."""
        end = start + count
        if end > self._max_length:
            raise PlanError(f"row {row.idx} computes position {end - 1} of at most {self._max_length}")
        if end > row.num_pages * self._page_size:
            raise PlanError(
                f"row {row.idx} computes position {end - 1} with {row.num_pages} pages of {self._page_size}"
            )
        for logical_idx in range(start // self._page_size, (end - 1) // self._page_size + 1):
            page = int(row.pages[logical_idx])
            owner = self._owner.get(page)
            if owner != row.idx:
                raise PlanError(f"row {row.idx} writes page {page}, which belongs to row {owner}")
            if page in self._sealed:
                raise PlanError(f"row {row.idx} writes page {page}, which came filled to another row")

    def seal_filled(self, started: list[StartedRow]) -> None:
        """After the step: pages that came filled to these rows are not written again."""
        for row in started:
            self._sealed.update(row.pages[: row.first_position // self._page_size])
