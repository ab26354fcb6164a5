"""The pages that must stay free when a request is admitted: the near horizon against a simulation of all rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.schedule.policy import headroom, pages_of_next_steps
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.lane_schedule import FIRST_SHARE, SHARE_DECAY, SHARE_RAISE, LaneSchedule
from scheduler_svc.core.state.rows import Rows
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import World, info_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A row that computes `left` positions from position `begins` on and holds `held` pages."""

    begins: int
    left: int
    held: int


def rows_of(running: Sequence[Running], page_size: int) -> Rows:
    rows = Rows(max(1, len(running)), page_size)
    for row, one in enumerate(running, start=1):
        rows.handle[row] = row
        rows.planned[row] = rows.known[row] = one.begins
        rows.last[row] = one.begins + one.left
        rows.num_pages[row] = one.held
    return rows


def brute_force(running: Sequence[Running], page_size: int, steps: int = 0) -> int:
    """Simulates the rows and returns the most pages taken and not yet returned, over `steps` or a page of steps."""
    held, most = [one.held for one in running], 0
    taken = 0
    for step in range(steps or page_size):
        for i, one in enumerate(running):
            if step == one.left:
                taken -= held[i]
        for i, one in enumerate(running):
            if step < one.left and one.begins + step == held[i] * page_size:
                held[i] += 1
                taken += 1
        most = max(most, taken)
    return most


def exact(running: Sequence[Running], page_size: int, steps: int = 0) -> int:
    rows = rows_of(running, page_size)
    return pages_of_next_steps(rows, np.arange(1, len(running) + 1), page_size, steps or page_size)


@pytest.mark.parametrize(
    ("running", "most"),
    [
        # The page size is 4. The row is in the middle of its page and crosses one page edge.
        ([Running(begins=5, left=9, held=2)], 1),
        # The row ends before the edge, and at it.
        ([Running(begins=5, left=3, held=2)], 0),
        ([Running(begins=5, left=4, held=2)], 1),
        # A row that ends returns its pages before the other row needs one, or after.
        ([Running(begins=5, left=9, held=2), Running(begins=5, left=3, held=2)], 0),
        ([Running(begins=6, left=9, held=2), Running(begins=5, left=3, held=2)], 1),
        ([Running(begins=6, left=9, held=2), Running(begins=6, left=2, held=2)], 0),
        # Both rows cross an edge, the second one at once.
        ([Running(begins=6, left=9, held=2), Running(begins=8, left=9, held=2)], 2),
        # Each row ends with the page that it has just taken.
        ([Running(begins=8, left=1, held=2), Running(begins=8, left=1, held=2)], 2),
    ],
)
def test_the_near_horizon_equals_cases_worked_out_by_hand(running: list[Running], most: int) -> None:
    assert brute_force(running, 4) == exact(running, 4) == most


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Running], int]:
    page_size = draw(st.integers(1, 9))
    running = [
        # A row may hold pages for positions that it has not begun.
        Running(
            begins=begins,
            left=draw(st.integers(0, 2 * page_size + 2)),
            held=-(-begins // page_size) + draw(st.sampled_from([0, 0, 1, 2])),
        )
        for begins in draw(st.lists(st.integers(1, 6 * page_size), min_size=1, max_size=12))
    ]
    return running, page_size


@given(crowds(), st.data())
def test_the_near_horizon_equals_a_simulation_of_all_rows(
    crowd: tuple[list[Running], int], data: st.DataObject
) -> None:
    running, page_size = crowd
    steps = data.draw(st.integers(1, page_size))
    assert exact(running, page_size, steps) == brute_force(running, page_size, steps)


# Admission rules and the expected share ---------------------------------------------------------------------------


def lane_of(rows: Rows, info: WorkerInfo, share: float) -> Lane:
    return cast(Lane, SimpleNamespace(rows=rows, info=info, schedule=SimpleNamespace(expected_share=share)))


def test_each_admission_rule_keeps_its_headroom() -> None:
    info = info_of(Shape(page_size=4, num_pages=401))
    rows = rows_of([Running(begins=6, left=80, held=2), Running(begins=5, left=40, held=2)], 4)
    assert headroom(lane_of(rows, info, 0.5), Admission.KNOWN) == 0
    # No row is seated according to the counter.
    assert headroom(lane_of(rows, info, 0.5), Admission.HORIZON) == 0
    rows.num_seated = 2
    assert headroom(lane_of(rows, info, 0.5), Admission.KNOWN) == 0
    assert headroom(lane_of(rows, info, 0.5), Admission.WATERMARK) == 4
    # Each row takes one page for certain. Half of their remaining output is 60 tokens.
    assert headroom(lane_of(rows, info, 0.0), Admission.HORIZON) == 2
    assert headroom(lane_of(rows, info, 0.5), Admission.HORIZON) == 15
    # With a window of 200 they still take 80 and 40 tokens. With a window of 8 they take 2 and 3, then release as many.
    wide = info_of(Shape(page_size=4, num_pages=401, window=200))
    assert headroom(lane_of(rows, wide, 0.5), Admission.HORIZON) == 15
    sliding = info_of(Shape(page_size=4, num_pages=401, window=8))
    assert headroom(lane_of(rows, sliding, 0.5), Admission.HORIZON) == 2


def test_the_expected_share_decays_with_each_planned_step() -> None:
    schedule, steps = LaneSchedule(), 0
    share = schedule.expected_share
    assert share == FIRST_SHARE
    while share > FIRST_SHARE / 100:
        schedule.step_planned()
        assert 0 < schedule.expected_share < share
        share, steps = schedule.expected_share, steps + 1
    assert steps == math.ceil(math.log(1 / 100) / math.log(SHARE_DECAY))


def test_a_preemption_raises_the_expected_share_to_at_most_one() -> None:
    schedule = LaneSchedule()
    schedule.has_preempted = True
    schedule.step_planned()
    assert schedule.expected_share == FIRST_SHARE + SHARE_RAISE
    for _ in range(math.ceil(1 / SHARE_RAISE)):
        schedule.has_preempted = True
        schedule.step_planned()
    assert schedule.expected_share == 1.0


def seated_and_preempted(admission: Admission) -> tuple[int, int]:
    """Returns the rows seated in the first step, and the preemptions, of requests that need more than the pool."""
    config = CoreConfig(policy=Policy(admission=admission))
    world = World(Shape(page_size=4, num_pages=41, max_rows=16, token_budget=128), config)
    for i in range(16):
        world.submit([i] * 6, max_new_tokens=30, ignore_eos=True)
    world.step()
    seated = world.lane.rows.num_seated
    world.finish()
    return seated, world.core.counters.preemptions


def test_admission_without_headroom_preempts_more() -> None:
    known, horizon = seated_and_preempted(Admission.KNOWN), seated_and_preempted(Admission.HORIZON)
    assert known[0] == 16
    assert horizon[0] < known[0]
    assert horizon[1] < known[1]


def test_an_idle_core_keeps_its_expected_share() -> None:
    """The share decays with planned steps. An idle service ticks several times a second without planning."""
    world = World(config=CoreConfig(silence_timeout_seconds=1e6))
    world.submit([1, 2], max_new_tokens=6, ignore_eos=True)
    world.run()
    steps, share = world.lane.step, world.lane.schedule.expected_share
    assert share == pytest.approx(FIRST_SHARE * SHARE_DECAY**steps)
    for _ in range(2400):
        world.tick(0.25)
    assert world.lane.schedule.expected_share == share
