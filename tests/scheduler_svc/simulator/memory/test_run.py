"""Runs of a workload: short ones checked by hand, longer ones against the raw extents of the layout."""

import copy
from collections.abc import Mapping

import pytest

from scheduler_svc.simulator.cost.hardware import MODELS
from scheduler_svc.simulator.memory.charts.figures import figures
from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.layouts.layout import Layout
from scheduler_svc.simulator.memory.layouts.registry import LAYOUTS
from scheduler_svc.simulator.memory.recompute import read_tokens
from scheduler_svc.simulator.memory.run import count_that_fit, run_workload
from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Sequence, Workload, draw
from tests.scheduler_svc.simulator.memory.asking import (
    Extents,
    covered,
    extents_of,
    largest_hole,
    lengths_of,
    sequence,
    settings,
)

GEOMETRY = Geometry(model=MODELS["llama-3.1-8b"])
BUSY = settings(
    sequences=12, lives=3, min_length=5, max_length=60, reserve=64, memory_tokens=256, growth=1.5, gap=1.0,
    prefix_groups=2, prefix_length=14, samples=2,
)  # fmt: skip


def clients(*requests: list[Sequence], arrivals: tuple[int, ...] | None = None) -> Workload:
    """Returns a workload with one client per list and one sequence per request."""
    return Workload(
        clients=tuple(tuple((of,) for of in client) for client in requests), arrivals=arrivals or (0,) * len(requests)
    )


def test_sequences_use_the_same_reservation_one_after_another():
    asked = settings(memory_tokens=8, reserve=8, max_length=8)
    workload = clients(
        [sequence(0, [0] * 4, prompt=2)], [sequence(1, [0] * 3, prompt=2), sequence(2, [0] * 3, prompt=1)]
    )
    record = run_workload(workload, LAYOUTS["contiguous"](asked), asked)
    # Steps 0 and 1: the first grows to 4. Step 2: the second runs. Steps 3 and 4: the second client's next sequence.
    assert list(record.steps["used"]) == [3, 4, 3, 2, 3]
    assert list(record.steps["reserved"]) == [8] * 5
    assert list(record.steps["running"]) == [1] * 5
    assert list(record.steps["waiting"]) == [1, 1, 0, 0, 0]
    assert list(record.steps["read"]) == [3, 4, 3, 2, 3]
    assert list(record.waits) == [0, 2, 0]
    assert (record.finished, record.decoded, record.prefilled, record.last_demand) == (3, 5, 5, 1)


def test_the_youngest_is_preempted_and_recomputed():
    asked = settings(memory_tokens=12, page_size=4, reserve=8, max_length=8)
    old, young = sequence(0, [0] * 6, prompt=3), sequence(1, [1] * 5, prompt=3)
    record = run_workload(clients([old], [young]), LAYOUTS["paged"](asked), asked)
    # Two pages: both are admitted in step 0. In step 1 the old one needs a second page. Step 3: the young one again.
    assert list(record.steps["running"]) == [2, 1, 1, 1]
    assert list(record.steps["used"]) == [8, 5, 6, 5]
    assert (record.preemptions, record.recomputed, record.prefilled, record.decoded) == (1, 4, 10, 5)


@pytest.mark.parametrize(("name", "hits"), [("paged", 0), ("shared", 4)])
def test_a_preempted_sequence_is_readmitted_before_a_later_one(name: str, hits: int):
    asked = settings(memory_tokens=20, page_size=4, reserve=12, max_length=12)
    old, young, late = sequence(0, [0] * 9, prompt=7), sequence(1, [1] * 12, prompt=7), sequence(2, [2] * 12, prompt=9)
    layout = LAYOUTS[name](asked)
    record = run_workload(clients([old], [young], [late], arrivals=(0, 0, 1)), layout, asked)
    # In step 1 the old one takes the young one's last page and ends. In steps 2 to 5 there is room for the young one
    # only, and the first of its two pages is still cached.
    assert list(record.steps["running"]) == [2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert list(record.steps["waiting"]) == [0, 2, 1, 1, 1, 1, 0, 0, 0]
    assert list(record.waits) == [0, 0, 5]
    assert (record.preemptions, record.recomputed, record.hit, record.last_demand) == (1, 8 - hits, hits, 5)
    found = figures(record, layout, 0, GEOMETRY)
    assert (found.delayed, found.wait_mean_steps, found.running_mean, found.read_saved) == (1, 5 / 3, 7 / 6, 0)


def test_no_sequence_is_admitted_between_a_preemption_and_an_end():
    asked = settings(memory_tokens=12, growth=1.0)
    old, young = sequence(0, [0] * 6, prompt=3), sequence(1, [1] * 7, prompt=5)
    record = run_workload(clients([old], [young]), LAYOUTS["growing"](asked), asked)
    # The young one has slots 3 to 7 and the old one moves behind them, so the young one cannot grow and is preempted.
    # It would fit again in step 1, and be preempted again in the same step.
    assert (record.preemptions, list(record.steps["running"])) == (1, [1, 1, 1, 1, 1])


def test_the_last_step_of_full_demand_precedes_the_end_of_the_first_client():
    asked = settings(memory_tokens=24, reserve=12, max_length=12)
    short, long = sequence(0, [0] * 4, prompt=2), sequence(1, [0] * 6, prompt=2)
    record = run_workload(clients([short], [long]), LAYOUTS["contiguous"](asked), asked)
    assert list(record.steps["running"]) == [2, 2, 1, 1]
    assert record.last_demand == 1


def test_a_sequence_that_can_never_fit_is_rejected_and_its_client_continues():
    asked = settings(memory_tokens=16, page_size=4, reserve=64, max_length=64)
    long, short = sequence(0, [0] * 13, prompt=2), sequence(1, [0] * 3, prompt=2)
    record = run_workload(clients([long, short]), LAYOUTS["paged"](asked), asked)
    assert (record.rejected, record.finished, list(record.steps["running"])) == (1, 1, [0, 1])


def test_count_that_fit_counts_full_lengths_until_one_does_not_fit():
    asked = settings(memory_tokens=20, page_size=4, reserve=8, max_length=8)
    workload = clients(*([sequence(i, [0] * length)] for i, length in enumerate((5, 8, 2))))
    counts = {name: count_that_fit(workload, layout(asked)) for name, layout in LAYOUTS.items() if name != "shared"}
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


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_equal_those_computed_from_the_raw_extents(name: str, window: int | None):
    asked = settings(**{**BUSY.model_dump(), "window": window})
    layout, seen = spied(name, asked)
    workload = draw(asked)
    record = run_workload(workload, layout, asked)
    found = figures(record, layout, count_that_fit(workload, LAYOUTS[name](asked)), GEOMETRY)
    # Computed again from the extents alone: slots held, slots written, the largest hole.
    reserved, used, saved, broken = [], [], [], []
    for extents, lengths in seen:
        held = {slot for runs in extents.values() for slot in covered(runs)}
        written: set[int] = set()
        for index, runs in extents.items():
            first = max(0, lengths[index] - (window or lengths[index]))
            behind = first // asked.page_size * asked.page_size if name in ("paged", "shared") else first
            written.update(covered(runs)[: lengths[index] - behind])
        free = asked.memory_tokens - layout.overhead - len(held)
        reserved.append(len(held))
        used.append(len(written))
        saved.append(sum(len(covered(runs)) for runs in extents.values()) - len(held))
        hole = largest_hole(layout, held) if name == "growing" else free
        broken.append(1 - hole / free if free else None)
    demand = slice(0, found.demand_steps)
    assert found.steps == len(seen) > found.demand_steps == record.last_demand + 1
    assert found.grow.calls == found.decoded_tokens and 0 < found.grow.median_us < found.grow.p99_us
    assert found.used_mean_tokens == pytest.approx(mean(used[demand]))
    assert (found.used_peak_tokens, found.reserved_peak_tokens) == (max(used), max(reserved))
    assert found.reserved_mean_tokens == pytest.approx(mean(reserved[demand]))
    assert found.wasted_peak_tokens == max(r - u for r, u in zip(reserved, used, strict=True))
    assert found.utilisation_mean == pytest.approx(mean(used[demand]) / 256)
    assert found.utilisation_peak == max(used) / 256
    assert found.internal_fragmentation == pytest.approx(1 - sum(used[demand]) / sum(reserved[demand]))
    assert found.external_fragmentation == pytest.approx(mean([b for b in broken[demand] if b is not None]))
    assert found.external_fragmentation_peak == pytest.approx(max((b for b in broken if b is not None), default=0.0))
    assert (found.saved_peak_tokens, found.saved_mean_tokens) == (max(saved), pytest.approx(mean(saved[demand])))


def mean(values: list[float]) -> float:
    """Returns 0 for an empty list."""
    return sum(values) / max(1, len(values))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_counts_of_a_run_add_up(name: str, seed: int):
    asked = settings(**{**BUSY.model_dump(), "seed": seed, "window": 32})
    workload = draw(asked)
    layout = LAYOUTS[name](asked)
    record = run_workload(workload, layout, asked)
    sequences = workload.in_order()
    assert (record.finished, record.rejected, len(record.waits)) == (36, 0, 36)
    assert record.decoded == sum(of.length - of.prompt for of in sequences) == len(record.grow_ns)
    assert sum(record.steps["read_full"]) == read_tokens(sequences, None)
    assert sum(record.steps["read"]) == read_tokens(sequences, 32)
    assert record.prefilled - sum(of.prompt for of in sequences) >= record.recomputed
    assert len(record.admit_ns) == 36 + record.preemptions
    assert (layout.reserved, layout.used, layout.saved, dict(extents_of(layout))) == (0, 0, 0, {})
    # A second run is equal, except for measured times.
    again = run_workload(workload, LAYOUTS[name](asked), asked)
    assert (again.step_numbers, again.waits, again.preemptions) == (
        record.step_numbers,
        record.waits,
        record.preemptions,
    )


def test_each_layout_runs_more_at_once_than_the_one_before():
    asked = settings(**{**BUSY.model_dump(), "samples": 1})
    workload = draw(asked)
    at_once: list[float] = []
    for name in ("contiguous", "growing", "paged", "shared"):
        layout = LAYOUTS[name](asked)
        record = run_workload(workload, layout, asked)
        at_once.append(figures(record, layout, 0, GEOMETRY).running_mean)
        if name == "contiguous":
            assert figures(record, layout, 0, GEOMETRY).internal_fragmentation > 0.3
        if name == "growing":
            assert layout.moved > 0 and layout.refused_by_fragmentation > 0
        if name == "shared":
            assert record.hit > 0
    assert at_once == sorted(at_once)
