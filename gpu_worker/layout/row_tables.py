"""Row tables: the sequence in each row, its pages, its next position, and its sampling features.

`RowTables` has the tables and their incremental checksum (worker.proto), and checks plans against the state of rows.
`RowFeatures` has what few rows use (bans, biases, penalties, allowed tokens, logprobs), and two bytes per row with the
features that the row uses. If no row uses a feature, a step reads only these bytes.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpu_worker.arrays import HostArray, Int64Array
from gpu_worker.geometry import Geometry
from gpu_worker.sampling.inputs import filters_late
from gpu_worker.wire.fields import Int32Array, PlanError
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.started import SETTINGS, StartedRows
from tandem_contract.row_checksum import MASK_64, row_weights, sum_of_pages, sum_of_positions

Float64Array = NDArray[np.float64]
_Rule = tuple[NDArray[np.bool_], str]
_NO_EDITS = np.zeros((3, 0), np.int64)


class Feature(IntEnum):
    """The features of a row, as bits. Not an IntFlag, because its operators cost a microsecond each."""

    # Tokens that are banned until the row reaches a position.
    BANS = 1
    BIASES = 2
    # A presence, frequency or repetition penalty, which needs the row's tokens on the device.
    PENALTIES = 4
    ALLOWED = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32
    # The row is not greedy.
    DRAWS = 64
    # It draws and has a late filter.
    LATE_FILTERS = 128
    # Its tokens are those of a mask, which comes while the step runs.
    CONSTRAINT = 256


class RowFeatures:
    """Arrays with one entry per row. An entry is meaningless if the row's `uses` lacks the bit of the feature."""

    def __init__(self, num_rows: int) -> None:
        self.uses = np.zeros(num_rows, np.uint16)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.banned_until = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.prompt_logprobs_from = np.zeros(num_rows, np.int64)
        self.reset()

    def reset(self) -> None:
        self.uses[:] = 0
        self.banned: dict[int, Int64Array] = {}
        self.biases: dict[int, tuple[Int64Array, Float64Array]] = {}
        self.allowed: dict[int, Int64Array] = {}

    def start(self, started: StartedRows, *, draws: NDArray[np.bool_], is_late: NDArray[np.bool_]) -> None:
        """Stores the features of started rows. `draws`, `is_late` [rows]: whether they draw, and with late filters."""
        rows = started.rows
        self.num_prompt[rows] = started.num_prompt_tokens
        self.banned_until[rows] = started.banned_until
        self.num_logprobs[rows] = started.num_logprobs
        self.prompt_logprobs_from[rows] = started.prompt_logprobs_from
        for i, row in enumerate(rows.tolist()):
            sampling, settings, uses = started.sampling[i], started.sampling[i].settings, 0
            if settings.presence_penalty or settings.frequency_penalty or settings.repetition_penalty != 1:
                uses |= Feature.PENALTIES
            if sampling.biased.size:
                uses |= Feature.BIASES
                self.biases[row] = sampling.biased, sampling.biases
            if sampling.allowed.size:
                uses |= Feature.ALLOWED
                self.allowed[row] = sampling.allowed
            if started.banned_until[i] and started.banned[i].size:
                uses |= Feature.BANS
                self.banned[row] = started.banned[i].astype(np.int64)
            if started.constraints and started.constraints[i]:
                uses |= Feature.CONSTRAINT
            self.uses[row] = uses
        for bit, has in (
            (Feature.LOGPROBS, started.num_logprobs > 0),
            (Feature.PROMPT_LOGPROBS, started.prompt_logprobs_from > 0),
            (Feature.DRAWS, draws),
            (Feature.LATE_FILTERS, is_late),
        ):
            self.uses[rows] |= np.where(has, bit, 0).astype(np.uint16)


class RowTables:
    """The host's tables. The core tracks the same content and sends its checksum with each plan."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        num = geometry.max_rows + 1
        self._row_weights = row_weights(num)
        self.page_table = np.zeros((num, geometry.pages_per_row), np.int32)
        # log2 of the page size, as an array without dimensions.
        self.page_shift = np.array(geometry.page_size.bit_length() - 1)
        self.sampling: dict[str, HostArray] = {name: np.zeros(num, setting.dtype) for name, setting in SETTINGS.items()}
        self.sampling["sample_idx"] = np.zeros(num, np.int64)
        self.features = RowFeatures(num)
        self.reset()

    def reset(self) -> None:
        num = self.geometry.max_rows + 1
        # Next position to compute.
        self.position = np.zeros(num, np.int64)
        # Number of tokens, including those that plans in flight sample; 0 if the row was never started.
        self.num_tokens = np.zeros(num, np.int64)
        # Number of tokens that the row started with.
        self.num_started = np.zeros(num, np.int64)
        self.num_pages = np.zeros(num, np.int64)
        # Positions for which a row has pages, within max_length.
        self._capacity = np.zeros(num, np.int64)
        # Tokens that the row started with; sampled tokens are only on the device.
        self.tokens: dict[int, Int32Array] = {}
        self.features.reset()
        self._sum_of_pages = 0

    @property
    def checksum(self) -> int:
        """worker.proto's checksum of the tables."""
        # One product over all rows takes less time than an update for the rows that a plan advances.
        return (sum_of_positions(self.position, self._row_weights) + self._sum_of_pages) & MASK_64

    def apply(self, plan: Plan) -> Int64Array:
        """Starts rows and appends pages. Raises PlanError if the plan does not fit the tables.

        Returns the entries of the page table that this sets, in order, int64 [3, n]: rows, logical pages, pages.
        """
        parts: list[Int64Array] = []
        if plan.started is not None and plan.started.rows.size:
            parts.append(self._start(plan.started))
        if plan.append_rows.size:
            parts.append(self._append(plan.append_rows.astype(np.int64), plan.append_pages.astype(np.int64)))
        if len(parts) == 2:
            return np.concatenate(parts, axis=1)
        return parts[0] if parts else _NO_EDITS

    def _start(self, started: StartedRows) -> Int64Array:
        rows = started.rows.astype(np.int64)
        counts = np.array([pages.size for pages in started.pages], np.int64)
        self._sum_of_pages -= self._sum_over(rows)
        for i, row in enumerate(rows.tolist()):
            self.page_table[row, : counts[i]] = started.pages[i]
            self.tokens[row] = started.tokens[i]
            self.num_tokens[row] = self.num_started[row] = started.tokens[i].size
        self._set_num_pages(rows, counts)
        self._sum_of_pages += self._sum_over(rows)
        for name, setting in SETTINGS.items():
            values = [getattr(one.settings, name) for one in started.sampling]
            self.sampling[name][rows] = np.array(values, setting.dtype)
        self.sampling["sample_idx"][rows] = started.sample_idx
        # The most probable token alone: a filter would leave all tokens whose logits are equal to the largest.
        self.sampling["temperature"][rows[self.sampling["top_k"][rows] == 1]] = 0
        draws = self.sampling["temperature"][rows] > 0
        self.features.start(started, draws=draws, is_late=filters_late(self.sampling, rows))
        self.position[rows] = started.first_position
        all_rows, cols = self._entries(rows)
        return np.stack((all_rows, cols, self.page_table[all_rows, cols].astype(np.int64)))

    def _set_num_pages(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.num_pages[rows] = counts
        self._capacity[rows] = np.minimum(counts * self.geometry.page_size, self.geometry.max_length)

    def _entries(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the row and the logical page of each entry that the page table has for `rows`."""
        counts = self.num_pages[rows]
        ends = np.cumsum(counts)
        return np.repeat(rows, counts), np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)

    def _sum_over(self, rows: NDArray[np.int64]) -> int:
        all_rows, cols = self._entries(rows)
        return sum_of_pages(all_rows, cols, self.page_table[all_rows, cols])

    def _append(self, rows: NDArray[np.int64], pages: NDArray[np.int64]) -> Int64Array:
        cols = self.num_pages[rows]
        if len(set(rows.tolist())) < rows.size:
            cols += _nth_of_equals(rows)
        is_started = self.num_tokens[rows] > 0
        is_valid = is_started & (cols < self.geometry.pages_per_row)
        if not _all(is_valid):
            first = np.flatnonzero(~is_valid)[0]
            if not is_started[first]:
                raise PlanError(f"appends.rows contains row {rows[first]}, which was never started")
            raise PlanError(
                f"row {rows[first]} gets page {cols[first] + 1}; the limit is {self.geometry.pages_per_row}"
            )
        self.page_table[rows, cols] = pages
        # The last one of a row's pages counts.
        self._set_num_pages(rows, cols + 1)
        self._sum_of_pages += sum_of_pages(rows, cols, pages)
        return np.stack((rows, cols, pages))

    def check(self, plan: Plan) -> None:
        """Raises PlanError if a row cannot compute what the plan requests."""
        if plan.chunk_rows.size:
            self._check_chunks(plan)
        rows = plan.decode_rows.astype(np.int64)
        ends, num_tokens = self.position[rows] + 1, self.num_tokens[rows]
        at_last = ends == num_tokens
        # Implies that every rule holds.
        if not _all(at_last & (ends <= self._capacity[rows])):
            problem = "cannot decode: its next position is not that of its last token"
            _require(rows, *self._rules(rows, num_tokens, ends), (at_last, problem))

    def _check_chunks(self, plan: Plan) -> None:
        rows = plan.chunk_rows.astype(np.int64)
        starts = plan.chunk_starts.astype(np.int64)
        ends, num_tokens = starts + plan.chunk_counts, self.num_tokens[rows]
        _require(
            rows,
            *self._rules(rows, num_tokens, ends),
            (starts == self.position[rows], "has a chunk that does not start at its next position"),
            (ends <= self.num_started[rows], "has a chunk that ends past the tokens that it started with"),
            (plan.chunk_samples == (ends == num_tokens), "has a wrong value in chunk_samples"),
        )

    def _rules(
        self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[_Rule, ...]:
        """The rules for rows with `num_tokens` that compute the positions before `ends`."""
        return (
            (num_tokens > 0, "was never started"),
            (ends <= self.geometry.max_length, "computes past max_length"),
            (ends <= self.num_pages[rows] * self.geometry.page_size, "has too few pages for the positions it computes"),
        )

    def advance(self, plan: Plan) -> None:
        """Advances the running rows by the positions that the plan computes. Requires that `check` has passed."""
        if plan.chunk_rows.size:
            self.position[plan.chunk_rows] += plan.chunk_counts
            self.num_tokens[plan.chunk_rows] += plan.chunk_samples
        # 1 for each row that decodes; no row occurs twice.
        decodes = np.bincount(plan.decode_rows, minlength=self.position.size)
        self.position += decodes
        self.num_tokens += decodes


def _nth_of_equals(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each value how many equal ones precede it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_first = np.ones(values.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    nth = np.arange(values.size)
    result = np.empty(values.size, np.int64)
    result[order] = nth - np.maximum.accumulate(nth * is_first)
    return result


def _require(rows: NDArray[np.int64], *rules: _Rule) -> None:
    """Raises PlanError for the first rule that some row breaks.

    A rule is, for each row, whether it holds, and the problem if it does not.
    """
    all_hold = rules[0][0]
    for holds, _ in rules[1:]:
        all_hold = all_hold & holds
    if _all(all_hold):
        return
    for holds, problem in rules:
        if not _all(holds):
            raise PlanError(f"row {rows[~holds][0]} {problem}")


def _all(flags: NDArray[np.bool_]) -> bool:
    # A fifth of the time of flags.all().
    return np.count_nonzero(flags) == flags.size
