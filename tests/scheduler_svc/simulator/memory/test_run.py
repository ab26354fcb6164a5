"""Runs of a workload: short ones checked by hand, longer ones against the raw extents of the layout."""

import copy
from collections.abc import Mapping

import numpy as np
import pytest

from scheduler_svc.simulator.layouts import LAYOUTS, Layout, Sequence, Settings, draw
from scheduler_svc.simulator.memory import Run, count_that_fit, figures, percent
from tests.scheduler_svc.simulator.memory.asking import (
    Extents,
    covered,
    extents_of,
    largest_hole,
    lengths_of,
    sequence,
    settings,
)

BUSY = settings(
    sequences=12, lives=3, min_length=5, max_length=60, reserve=64, memory_tokens=256, growth=1.5, gap=1.0,
    prefix_groups=2, prefix_length=14,
)  # fmt: skip
COLUMNS = ("used", "reserved", "free", "largest_hole", "saved", "running", "read")


def ran(layout: Layout, *clients: list[Sequence], arrivals: tuple[int, ...] | None = None) -> Run:
    """Returns the run of these clients, which send their first sequences at these steps."""
    return Run(layout, list(clients), list(arrivals or (0,) * len(clients))).to_end()


def column(run: Run, name: str) -> list[int]:
    return [row[COLUMNS.index(name)] for row in run.rows]


def test_sequences_use_the_same_reservation_one_after_another():
    asked = settings(memory_tokens=8, reserve=8, max_length=8)
    second = [sequence(1, [0] * 3, prompt=2), sequence(2, [0] * 3, prompt=1)]
    record = ran(LAYOUTS["contiguous"](asked), [sequence(0, [0] * 4, prompt=2)], second)
    # Steps 0 and 1: the first grows to 4. Step 2: the second runs. Steps 3 and 4: the second client's next sequence.
    assert column(record, "used") == [3, 4, 3, 2, 3]
    assert column(record, "reserved") == [8] * 5
    assert column(record, "running") == [1] * 5
    assert column(record, "read") == [3, 4, 3, 2, 3]
    assert record.waits == [0, 2, 0]
    assert (record.decoded, record.prefilled, record.last_demand) == (5, 5, 1)


def test_the_youngest_is_preempted_and_recomputed():
    asked = settings(memory_tokens=12, page_size=4, reserve=8, max_length=8)
    old, young = sequence(0, [0] * 6, prompt=3), sequence(1, [1] * 5, prompt=3)
    record = ran(LAYOUTS["paged"](asked), [old], [young])
    # Two pages: both are admitted in step 0. In step 1 the old one needs a second page. Step 3: the young one again.
    assert column(record, "running") == [2, 1, 1, 1]
    assert column(record, "used") == [8, 5, 6, 5]
    assert (record.preemptions, record.recomputed, record.prefilled, record.decoded) == (1, 4, 10, 5)


@pytest.mark.parametrize(("name", "hits"), [("paged", 0), ("shared", 4)])
def test_a_preempted_sequence_is_readmitted_before_a_later_one(name: str, hits: int):
    asked = settings(memory_tokens=20, page_size=4, reserve=12, max_length=12)
    old, young, late = sequence(0, [0] * 9, prompt=7), sequence(1, [1] * 12, prompt=7), sequence(2, [2] * 12, prompt=9)
    record = ran(LAYOUTS[name](asked), [old], [young], [late], arrivals=(0, 0, 1))
    # In step 1 the old one takes the young one's last page and ends. In steps 2 to 5 there is room for the young one
    # only, and the first of its two pages is still cached.
    assert column(record, "running") == [2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert record.waits == [0, 0, 5]
    assert (record.preemptions, record.recomputed, record.hit, record.last_demand) == (1, 8 - hits, hits, 5)
    found = figures(record, 0, 1)
    assert found["rejected / queued"] == "0 / 1"
    assert found["steps in the queue, mean / p99"] == "2 / 5" and found["running, mean / peak"] == "1.2 / 2"


def test_no_sequence_is_admitted_between_a_preemption_and_an_end():
    asked = settings(memory_tokens=12, growth=1.0)
    old, young = sequence(0, [0] * 6, prompt=3), sequence(1, [1] * 7, prompt=5)
    record = ran(LAYOUTS["growing"](asked), [old], [young])
    # The young one has slots 3 to 7 and the old one moves behind them, so the young one cannot grow and is preempted.
    # It would fit again in step 1, and be preempted again in the same step.
    assert (record.preemptions, column(record, "running")) == (1, [1, 1, 1, 1, 1])


def test_the_last_step_of_full_demand_precedes_the_end_of_the_first_client():
    asked = settings(memory_tokens=24, reserve=12, max_length=12)
    short, long = sequence(0, [0] * 4, prompt=2), sequence(1, [0] * 6, prompt=2)
    record = ran(LAYOUTS["contiguous"](asked), [short], [long])
    assert column(record, "running") == [2, 2, 1, 1]
    assert record.last_demand == 1


def test_a_sequence_that_can_never_fit_is_rejected_and_its_client_continues():
    asked = settings(memory_tokens=16, page_size=4, reserve=64, max_length=64)
    long, short = sequence(0, [0] * 13, prompt=2), sequence(1, [0] * 3, prompt=2)
    record = ran(LAYOUTS["paged"](asked), [long, short])
    assert (record.rejected, len(record.waits), column(record, "running")) == (1, 1, [0, 1])


def test_count_that_fit_counts_full_lengths_until_one_does_not_fit():
    asked = settings(memory_tokens=20, page_size=4, reserve=8, max_length=8)
    clients = [[sequence(i, [0] * length)] for i, length in enumerate((5, 8, 2))]
    counts = {name: count_that_fit(clients, layout(asked)) for name, layout in LAYOUTS.items() if name != "shared"}
    assert counts == {"contiguous": 2, "growing": 3, "paged": 2}


def spied(name: str, asked: Settings) -> tuple[Layout, list[tuple[Mapping[int, Extents], Mapping[int, int]]]]:
    """Returns a layout and the list into which it copies its extents and lengths in every step."""
    seen: list[tuple[Mapping[int, Extents], Mapping[int, int]]] = []

    class Spied(LAYOUTS[name]):  # type: ignore[misc]
        def largest_hole(self) -> int:
            seen.append((copy.deepcopy(dict(extents_of(self))), dict(lengths_of(self))))
            return super().largest_hole()

    layout: Layout = Spied(asked)
    return layout, seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_equal_those_computed_from_the_raw_extents(name: str):
    layout, seen = spied(name, BUSY)
    clients, arrivals = draw(BUSY)
    run = Run(layout, clients, arrivals).to_end()
    # Computed again from the extents alone: slots held, slots written, the largest hole.
    reserved, used, saved, broken = [], [], [], []
    for extents, lengths in seen:
        held = {slot for runs in extents.values() for slot in covered(runs)}
        written = {slot for index, runs in extents.items() for slot in covered(runs)[: lengths[index]]}
        free = BUSY.memory_tokens - layout.overhead - len(held)
        reserved.append(len(held))
        used.append(len(written))
        saved.append(sum(len(covered(runs)) for runs in extents.values()) - len(held))
        hole = largest_hole(layout, held) if name == "growing" else free
        broken.append(1 - hole / free if free else None)
    assert (column(run, "used"), column(run, "reserved"), column(run, "saved")) == (used, reserved, saved)
    demand = slice(0, run.last_demand + 1)
    assert len(seen) == len(run.rows) > run.last_demand + 1
    found = figures(run, count_that_fit(clients, LAYOUTS[name](BUSY)), 1)
    assert found["used, mean"].split()[0] == f"{np.mean(used[demand]):,.0f}"
    assert found["reserved and empty, mean"].split()[0] == f"{np.mean(reserved[demand]) - np.mean(used[demand]):,.0f}"
    assert found["utilisation, mean / peak"] == f"{percent(np.mean(used[demand]) / 256)} / {percent(max(used) / 256)}"
    assert found["internal fragmentation"] == percent(1 - sum(used[demand]) / sum(reserved[demand]))
    parts = [part for part in broken[demand] if part is not None]
    most = max((part for part in broken if part is not None), default=0.0)
    assert found["external fragmentation, mean / peak"] == f"{percent(sum(parts) / len(parts))} / {percent(most)}"
    assert found["saved by sharing, peak"].split()[0] == f"{max(saved)}"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_counts_of_a_run_add_up(name: str, seed: int):
    asked = settings(**{**BUSY.model_dump(), "seed": seed})
    clients, arrivals = draw(asked)
    layout = LAYOUTS[name](asked)
    run = Run(layout, clients, arrivals).to_end()
    sequences = [sequence for client in clients for sequence in client]
    assert (run.rejected, len(run.waits)) == (0, 36)
    assert run.decoded == sum(of.length - of.prompt for of in sequences)
    assert sum(column(run, "read")) == sum(sum(range(of.prompt + 1, of.length + 1)) for of in sequences)
    assert run.prefilled - sum(of.prompt for of in sequences) >= run.recomputed
    assert (layout.reserved, layout.used, layout.saved, layout.held) == (0, 0, 0, {})
    again = Run(LAYOUTS[name](asked), clients, arrivals).to_end()
    assert (again.rows, again.waits, again.preemptions) == (run.rows, run.waits, run.preemptions)


def test_each_layout_runs_more_at_once_than_the_one_before():
    clients, arrivals = draw(BUSY)
    runs = {name: Run(layout(BUSY), clients, arrivals).to_end() for name, layout in LAYOUTS.items()}
    at_once = [np.mean(column(run, "running")[: run.last_demand + 1]) for run in runs.values()]
    assert at_once == sorted(at_once)
    assert sum(column(runs["contiguous"], "used")) < 0.7 * sum(column(runs["contiguous"], "reserved"))
    assert runs["growing"].layout.moved > 0 and runs["growing"].layout.refused_by_fragmentation > 0
    assert runs["shared"].hit > 0
