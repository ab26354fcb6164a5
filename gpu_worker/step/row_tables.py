"""Row tables: the sequence in each row, its pages and its next position.

`RowTables` has the host's tables and their incremental checksum (worker.proto), and checks plans against the state of
rows. `DeviceTables` has the device's copy for kernels.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.arrays import Array
from gpu_worker.geometry import Geometry
from gpu_worker.step.row_features import RowFeatures
from gpu_worker.wire.fields import Int32Array, PlanError
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.sampling import SETTINGS
from gpu_worker.wire.started import StartedRows

UInt64Array = NDArray[np.uint64]
_MASK_64 = (1 << 64) - 1


def mix(values: UInt64Array) -> UInt64Array:
    """splitmix64's finaliser, elementwise, modulo 2^64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _page_terms(rows: NDArray[np.integer], cols: NDArray[np.integer], pages: Int32Array) -> UInt64Array:
    row_bits = rows.astype(np.uint64) << np.uint64(40)
    col_bits = cols.astype(np.uint64) << np.uint64(20)
    return mix(row_bits ^ col_bits ^ pages.astype(np.uint64))


def spread_order(num_slots: int) -> NDArray[np.int64]:
    """Returns a permutation of 0..num_slots-1 whose first k values are spread evenly, for every k (bit reversal).

    The CPU kernel gives each thread a contiguous part of the slots, and rows are allocated lowest first: in that order
    the first threads would compute all rows when few run.
    """
    bits = max(1, (num_slots - 1).bit_length())
    reversed_bits = [int(f"{slot:0{bits}b}"[::-1], 2) for slot in range(1 << bits)]
    return np.array([slot for slot in reversed_bits if slot < num_slots], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEdits:
    """The entries of the page table that a plan sets, in order: logical page `col` of a row is `page`."""

    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    pages: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEdits(Generic[Array]):
    """The same entries for the device's page table. Row r of the plan is line `slot_of_row[r]` of that table. All
    int64 [n]."""

    slots: Array
    cols: Array
    pages: Array


class RowTables:
    """The host's tables. The core tracks the same content and sends its checksum with each plan."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        num = geometry.max_rows + 1
        self._row_weights = mix((np.arange(num, dtype=np.uint64) << np.uint64(40)) ^ np.uint64(0xFFFFF))
        self._row_weights |= np.uint64(1)
        self.page_table = np.zeros((num, geometry.pages_per_row), np.int32)
        self.sampling: dict[str, NDArray[np.generic]] = {
            name: np.zeros(num, setting.dtype) for name, setting in SETTINGS.items()
        }
        self.sampling["sample_idx"] = np.zeros(num, np.int64)
        self.features = RowFeatures(num)
        self.reset()

    def reset(self) -> None:
        """Removes every row."""
        num = self.geometry.max_rows + 1
        # Next position to compute.
        self.position = np.zeros(num, np.int64)
        # Number of tokens, including those that plans in flight sample; 0 if the row was never started.
        self.num_tokens = np.zeros(num, np.int64)
        # Number of tokens that the row started with.
        self.num_started = np.zeros(num, np.int64)
        self.num_pages = np.zeros(num, np.int64)
        # Tokens that the row started with; sampled tokens are only on the device.
        self.tokens: dict[int, Int32Array] = {}
        self.features.reset()
        self._checksum = 0
        self._row_page_sums = np.zeros(num, np.uint64)

    @property
    def checksum(self) -> int:
        """worker.proto's checksum of the tables."""
        return self._checksum

    def apply(self, plan: Plan) -> TableEdits:
        """Starts rows and appends pages. Raises PlanError if the plan does not fit the tables."""
        parts: list[tuple[NDArray[np.integer], NDArray[np.integer], Int32Array]] = []
        if plan.started is not None and plan.started.rows.size:
            parts.append(self._start(plan.started))
        if plan.append_rows.size:
            parts.append(self._append(plan.append_rows, plan.append_pages))
        if not parts:
            none = np.zeros(0, np.int64)
            return TableEdits(rows=none, cols=none, pages=none)
        rows, cols, pages = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
        return TableEdits(rows=rows, cols=cols, pages=pages)

    def _start(self, started: StartedRows) -> tuple[NDArray[np.integer], NDArray[np.integer], Int32Array]:
        rows = started.rows.astype(np.int64)
        self._advance_checksum(rows, -self.position[rows])
        self._add_to_checksum(-self._row_page_sums[rows])
        counts = np.array([pages.size for pages in started.pages], np.int64)
        all_rows = np.repeat(rows, counts)
        cols = np.concatenate([np.arange(count) for count in counts])
        pages = np.concatenate(started.pages)
        for i, row in enumerate(rows.tolist()):
            self.page_table[row, : counts[i]] = started.pages[i]
            self.tokens[row] = started.tokens[i]
            self.num_tokens[row] = self.num_started[row] = started.tokens[i].size
        self.num_pages[rows] = counts
        for name, setting in SETTINGS.items():
            values = [getattr(one.settings, name) for one in started.sampling]
            self.sampling[name][rows] = np.array(values, setting.dtype)
        self.sampling["sample_idx"][rows] = started.sample_idx
        self.features.start(started)
        terms = _page_terms(all_rows, cols, pages)
        self._row_page_sums[rows] = 0
        np.add.at(self._row_page_sums, all_rows, terms)
        self._add_to_checksum(terms)
        self.position[rows] = started.first_position
        self._advance_checksum(rows, self.position[rows])
        return all_rows, cols, pages

    def _append(
        self, rows: Int32Array, pages: Int32Array
    ) -> tuple[NDArray[np.integer], NDArray[np.integer], Int32Array]:
        cols = np.empty(rows.size, np.int64)
        for i, (row, page) in enumerate(zip(rows.tolist(), pages.tolist(), strict=True)):
            if not self.num_tokens[row]:
                raise PlanError(f"appends.rows contains row {row}, which was never started")
            cols[i] = col = self.num_pages[row]
            if col >= self.geometry.pages_per_row:
                raise PlanError(f"row {row} gets page {col + 1}; the limit is {self.geometry.pages_per_row}")
            self.page_table[row, col] = page
            self.num_pages[row] += 1
        terms = _page_terms(rows, cols, pages)
        np.add.at(self._row_page_sums, rows, terms)
        self._add_to_checksum(terms)
        return rows, cols, pages

    def check(self, plan: Plan) -> None:
        """Raises PlanError if a row cannot compute what the plan requests."""
        rows = plan.chunk_rows.astype(np.int64)
        starts = plan.chunk_starts.astype(np.int64)
        ends = starts + plan.chunk_counts
        self._check_rows(rows, ends)
        _require(rows, starts == self.position[rows], "has a chunk that does not start at its next position")
        _require(rows, ends <= self.num_started[rows], "has a chunk that ends past the tokens that it started with")
        _require(rows, plan.chunk_samples == (ends == self.num_tokens[rows]), "has a wrong value in chunk_samples")
        rows = plan.decode_rows.astype(np.int64)
        self._check_rows(rows, self.position[rows] + 1)
        at_last = self.position[rows] == self.num_tokens[rows] - 1
        _require(rows, at_last, "cannot decode: its next position is not that of its last token")

    def _check_rows(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        _require(rows, self.num_tokens[rows] > 0, "was never started")
        _require(rows, ends <= self.geometry.max_length, "computes past max_length")
        covered = ends <= self.num_pages[rows] * self.geometry.page_size
        _require(rows, covered, "has too few pages for the positions it computes")

    def advance(self, plan: Plan) -> None:
        """Advances the running rows by the positions that the plan computes. Requires that `check` has passed."""
        self._advance_rows(plan.chunk_rows, plan.chunk_counts.astype(np.int64), plan.chunk_samples)
        num = plan.decode_rows.size
        self._advance_rows(plan.decode_rows, np.ones(num, np.int64), np.ones(num, np.bool_))

    def _advance_rows(self, rows: Int32Array, counts: NDArray[np.int64], samples: NDArray[np.bool_]) -> None:
        self.position[rows] += counts
        self.num_tokens[rows] += samples
        self._advance_checksum(rows, counts)

    def _advance_checksum(self, rows: NDArray[np.integer], counts: NDArray[np.int64]) -> None:
        self._add_to_checksum(counts.astype(np.uint64) * self._row_weights[rows])

    def _add_to_checksum(self, terms: UInt64Array) -> None:
        self._checksum = (self._checksum + int(terms.sum(dtype=np.uint64))) & _MASK_64


def _require(rows: NDArray[np.int64], holds: NDArray[np.bool_], problem: str) -> None:
    if not holds.all():
        raise PlanError(f"row {rows[~holds][0]} {problem}")


class DeviceTables:
    """The tables that kernels read: the page table, each page's logical index, newest tokens."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        num_slots = geometry.max_rows + 1
        # The CPU kernel requires lists as wide as the pool; other kernels need only the pages of a row.
        width = geometry.num_pages if on_cpu else geometry.pages_per_row
        self.slot_of_row = spread_order(num_slots) if on_cpu else np.arange(num_slots, dtype=np.int64)
        self.pages = torch.zeros(num_slots, max(width, geometry.pages_per_row), dtype=torch.int32, device=device)
        # A page that several rows share has the same logical index in each. The last entry is for the learned sinks.
        self.logical_of_page = torch.zeros(geometry.num_pages + 1, dtype=torch.int32, device=device)
        # The newest token of each row; row 0 is padding.
        self.newest_token = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def set_pages(self, edits: SlotEdits[torch.Tensor]) -> None:
        """Applies a plan's edits of the page table."""
        self.pages.index_put_((edits.slots, edits.cols), edits.pages.int())
        self.logical_of_page.index_put_((edits.pages,), edits.cols.int())
