"""Lives: by hand where they are short, and by what must be true of any."""

import copy
from collections.abc import Mapping

import pytest

from scheduler_svc.kv_lab.charts.figures import figures
from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.layouts.layout import Extents, Layout
from scheduler_svc.kv_lab.layouts.registry import LAYOUTS
from scheduler_svc.kv_lab.recompute import read_tokens
from scheduler_svc.kv_lab.run import fit, live
from scheduler_svc.kv_lab.settings import Settings
from scheduler_svc.kv_lab.workload import Sequence, Workload, draw
from scheduler_svc.simulator.cost.hardware import model_named
from tests.scheduler_svc.kv_lab.asking import covered, largest_hole, sequence, settings

GEOMETRY = Geometry(model=model_named("llama-3.1-8b"))
BUSY = settings(
    sequences=12, lives=3, min_length=5, max_length=60, reserve=64, memory_tokens=256, growth=1.5, gap=1.0,
    prefix_groups=2, prefix_length=14, samples=2,
)  # fmt: skip


def places(*lives: list[Sequence], arrivals: tuple[int, ...] | None = None) -> Workload:
    """Requests of one sequence each, one place per list."""
    return Workload(places=tuple(tuple((of,) for of in life) for life in lives), arrivals=arrivals or (0,) * len(lives))


def test_one_after_another_in_one_reservation():
    asked = settings(memory_tokens=8, reserve=8, max_length=8)
    workload = places(
        [sequence(0, [0] * 4, prompt=2)], [sequence(1, [0] * 3, prompt=2), sequence(2, [0] * 3, prompt=1)]
    )
    life = live(workload, LAYOUTS["contiguous"](asked), asked)
    # Steps 0 and 1: the first grows to 4. Step 2: the second. Steps 3 and 4: its successor, from the step behind it.
    assert list(life.steps.used) == [3, 4, 3, 2, 3]
    assert list(life.steps.reserved) == [8] * 5
    assert list(life.steps.running) == [1] * 5
    assert list(life.steps.waiting) == [1, 1, 0, 0, 0]
    assert list(life.steps.read) == [3, 4, 3, 2, 3]
    assert list(life.waits) == [0, 2, 0]
    assert (life.finished, life.decoded, life.prefilled, life.last_demand) == (3, 5, 5, 1)


def test_the_youngest_makes_room_and_is_computed_again():
    asked = settings(memory_tokens=12, page_size=4, reserve=8, max_length=8)
    old, young = sequence(0, [0] * 6, prompt=3), sequence(1, [1] * 5, prompt=3)
    life = live(places([old], [young]), LAYOUTS["paged"](asked), asked)
    # Two pages: both come in step 0; in step 1 the old one needs a second page. Step 3: the young one again.
    assert list(life.steps.running) == [2, 1, 1, 1]
    assert list(life.steps.used) == [8, 5, 6, 5]
    assert (life.preemptions, life.recomputed, life.prefilled, life.decoded) == (1, 4, 10, 5)


@pytest.mark.parametrize(("name", "found"), [("paged", 0), ("shared", 4)])
def test_who_was_preempted_goes_before_who_came_later(name: str, found: int):
    asked = settings(memory_tokens=20, page_size=4, reserve=12, max_length=12)
    old, young, late = sequence(0, [0] * 9, prompt=7), sequence(1, [1] * 12, prompt=7), sequence(2, [2] * 12, prompt=9)
    layout = LAYOUTS[name](asked)
    life = live(places([old], [young], [late], arrivals=(0, 0, 1)), layout, asked)
    # In step 1 the old one takes the young one's last page, and ends. Then there is room for the young one alone, in
    # steps 2 to 5; of its two pages the pool still has the first.
    assert list(life.steps.running) == [2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert list(life.steps.waiting) == [0, 2, 1, 1, 1, 1, 0, 0, 0]
    assert list(life.waits) == [0, 0, 5]
    assert (life.preemptions, life.recomputed, life.hit, life.last_demand) == (1, 8 - found, found, 5)
    told = figures(life, layout, 0, GEOMETRY)
    assert (told.delayed, told.wait_mean_steps, told.running_mean, told.read_saved) == (1, 5 / 3, 7 / 6, 0)


def test_nobody_is_admitted_between_a_preemption_and_an_end():
    asked = settings(memory_tokens=12, growth=1.0)
    old, young = sequence(0, [0] * 6, prompt=3), sequence(1, [1] * 7, prompt=5)
    life = live(places([old], [young]), LAYOUTS["growing"](asked), asked)
    # Slots 3 to 7 are the young one's. The old one moves behind them; then the young one cannot grow and goes. Its
    # place would be free in step 1, and be taken from it in the same step.
    assert (life.preemptions, list(life.steps.running)) == (1, [1, 1, 1, 1, 1])


def test_the_end_begins_when_a_place_has_seen_its_last():
    asked = settings(memory_tokens=24, reserve=12, max_length=12)
    short, long = sequence(0, [0] * 4, prompt=2), sequence(1, [0] * 6, prompt=2)
    life = live(places([short], [long]), LAYOUTS["contiguous"](asked), asked)
    assert list(life.steps.running) == [2, 2, 1, 1]
    assert life.last_demand == 1


def test_what_can_never_fit_is_rejected_and_its_place_goes_on():
    asked = settings(memory_tokens=16, page_size=4, reserve=64, max_length=64)
    long, short = sequence(0, [0] * 13, prompt=2), sequence(1, [0] * 3, prompt=2)
    life = live(places([long, short]), LAYOUTS["paged"](asked), asked)
    assert (life.rejected, life.finished, list(life.steps.running)) == (1, 1, [0, 1])


def test_fit_counts_whole_sequences_until_the_first_that_does_not():
    asked = settings(memory_tokens=20, page_size=4, reserve=8, max_length=8)
    workload = places(*([sequence(i, [0] * length)] for i, length in enumerate((5, 8, 2))))
    counts = {name: fit(workload, layout(asked)) for name, layout in LAYOUTS.items() if name != "shared"}
    assert counts == {"contiguous": 2, "growing": 3, "paged": 2}


def spied(name: str, asked: Settings) -> tuple[Layout, list[tuple[Mapping[int, Extents], Mapping[int, int]]]]:
    """A layout whose extents and lengths are written down whenever it is looked at."""
    seen: list[tuple[Mapping[int, Extents], Mapping[int, int]]] = []

    class Spied(LAYOUTS[name]):  # type: ignore[misc]
        def largest_hole(self) -> int:
            seen.append((copy.deepcopy(dict(self.extents())), dict(self.lengths())))
            return super().largest_hole()

    layout: Layout = Spied(asked)
    return layout, seen


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_are_those_of_the_raw_extents(name: str, window: int | None):
    asked = settings(**{**vars_of(BUSY), "window": window})
    layout, seen = spied(name, asked)
    workload = draw(asked)
    life = live(workload, layout, asked)
    told = figures(life, layout, fit(workload, LAYOUTS[name](asked)), GEOMETRY)
    # Read anew: slots held, slots written, the largest hole, all of them from the extents alone.
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
    demand = slice(0, told.demand_steps)
    assert told.steps == len(seen) > told.demand_steps == life.last_demand + 1
    assert told.grow.calls == told.decoded_tokens and 0 < told.grow.median_us < told.grow.p99_us
    assert told.used_mean_tokens == pytest.approx(mean(used[demand]))
    assert (told.used_peak_tokens, told.reserved_peak_tokens) == (max(used), max(reserved))
    assert told.reserved_mean_tokens == pytest.approx(mean(reserved[demand]))
    assert told.wasted_peak_tokens == max(r - u for r, u in zip(reserved, used, strict=True))
    assert told.utilisation_mean == pytest.approx(mean(used[demand]) / 256)
    assert told.utilisation_peak == max(used) / 256
    assert told.internal_fragmentation == pytest.approx(1 - sum(used[demand]) / sum(reserved[demand]))
    assert told.external_fragmentation == pytest.approx(mean([b for b in broken[demand] if b is not None]))
    assert told.external_fragmentation_peak == pytest.approx(max((b for b in broken if b is not None), default=0.0))
    assert (told.saved_peak_tokens, told.saved_mean_tokens) == (max(saved), pytest.approx(mean(saved[demand])))


def mean(values: list[float]) -> float:
    """0 of none."""
    return sum(values) / max(1, len(values))


def vars_of(asked: Settings) -> dict[str, object]:
    return {name: getattr(asked, name) for name in asked.__dataclass_fields__}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_any_life_must_add_up_to(name: str, seed: int):
    asked = settings(**{**vars_of(BUSY), "seed": seed, "window": 32})
    workload = draw(asked)
    layout = LAYOUTS[name](asked)
    life = live(workload, layout, asked)
    everyone = workload.in_order()
    assert (life.finished, life.rejected, len(life.waits)) == (36, 0, 36)
    assert life.decoded == sum(of.length - of.prompt for of in everyone) == len(life.grow_ns)
    assert sum(life.steps.read_full) == read_tokens(everyone, None)
    assert sum(life.steps.read) == read_tokens(everyone, 32)
    assert life.prefilled - sum(of.prompt for of in everyone) >= life.recomputed
    assert len(life.admit_ns) == 36 + life.preemptions
    assert (layout.reserved, layout.used, layout.saved, dict(layout.extents())) == (0, 0, 0, {})
    # The same again, but for the clock.
    again = live(workload, LAYOUTS[name](asked), asked)
    assert (again.steps, again.waits, again.preemptions) == (life.steps, life.waits, life.preemptions)


def test_the_layouts_stand_in_the_order_that_the_lab_is_about():
    asked = settings(**{**vars_of(BUSY), "samples": 1})
    workload = draw(asked)
    at_once: list[float] = []
    for name in ("contiguous", "growing", "paged", "shared"):
        layout = LAYOUTS[name](asked)
        life = live(workload, layout, asked)
        at_once.append(figures(life, layout, 0, GEOMETRY).running_mean)
        if name == "contiguous":
            assert figures(life, layout, 0, GEOMETRY).internal_fragmentation > 0.3
        if name == "growing":
            assert layout.moved > 0 and layout.refused_by_fragmentation > 0
        if name == "shared":
            assert life.hit > 0
    assert at_once == sorted(at_once)
