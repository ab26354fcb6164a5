"""The assignment of waiting requests to lanes, against the reference in which each lane asks all others."""

import random
from collections import deque

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import TenantLimits
from scheduler_svc.core.messages.plan import Plan
from tests.rigs.core_events import step_done
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.schedule.pairwise_placement import pairwise

Seats = list[tuple[str, int, list[tuple[int, int, list[int]]], list[int], list[int]]]


class QuietFleet(Fleet):
    audit_every = 64


class HollowFleet(QuietFleet):
    """Its workers compute nothing, and no test reads their samples: a plan has its result when it is due."""

    def _take(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.SendPlan):
            self.plans_of[effect.worker].append(effect.plan)
            self.due.setdefault(effect.worker, deque()).append(effect.plan)

    def __init__(self, *shapes: Shape) -> None:
        self.due: dict[str, deque[Plan]] = {}
        super().__init__(*shapes)

    def deliver_from(self, name: str) -> bool:
        """Delivers the result of the worker's oldest plan. Returns False without one."""
        if not self.due.get(name):
            return False
        self.handle(step_done(name, self.due[name].popleft()))
        return True


def play(kind: type[QuietFleet], seed: int, num_lanes: int, *, has_window: bool, tenants: int) -> tuple[Seats, Fleet]:
    """Runs random traffic on lanes of random sizes. Returns what each plan started and computed, and the fleet."""
    draw = random.Random(seed)
    shape = Shape(
        page_size=draw.choice([1, 4]),
        num_pages=draw.choice([40, 120]),
        max_rows=draw.choice([2, 5, 9]),
        max_length=40,
        token_budget=draw.choice([16, 64]),
        window=8 if has_window else 0,
        host_pages=draw.choice([0, 12]),
    )
    fleet = kind(*[shape] * num_lanes)
    if tenants:
        limits = {f"t{n}": TenantLimits(row_share=draw.choice([None, 0.4])) for n in range(tenants)}
        fleet.handle(ev.TenantsChanged(limits=limits))
    stems = [[draw.randrange(4) for _ in range(16)] for _ in range(3)]
    for _ in range(24):
        for _ in range(draw.choice([0, 0, 1, 3, 12])):
            ending = [draw.randrange(4) for _ in range(draw.randrange(1, 9))]
            fleet.submit(
                draw.choice(stems)[: draw.randrange(1, 16)] + ending,
                max_new_tokens=draw.randrange(1, 12),
                ignore_eos=True,
                priority=draw.choice([0, 0, 2]),
                num_samples=draw.choice([1, 1, 3]),
                tenant=f"t{draw.randrange(tenants)}" if tenants else "",
            )
        fleet.tick(0.001)
        for name in list(fleet.workers):
            if draw.random() < 0.8:
                fleet.serve(name)
    fleet.run()
    return [seat_of(name, plan) for name, plans in fleet.plans_of.items() for plan in plans], fleet


def seat_of(name: str, plan: Plan) -> tuple[str, int, list[tuple[int, int, list[int]]], list[int], list[int]]:
    starts = [(start.row, start.first_position, start.tokens.tolist()) for start in plan.starts]
    return name, plan.step, starts, plan.chunk_rows.tolist(), plan.decode_rows.tolist()


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize(("has_window", "tenants"), [(False, 0), (True, 0), (False, 2)])
def test_one_and_two_lanes_start_the_requests_that_the_reference_starts(
    num_lanes: int, has_window: bool, tenants: int
) -> None:
    num_starts = 0
    for seed in range(2):
        seats, _ = play(HollowFleet, seed, num_lanes, has_window=has_window, tenants=tenants)
        with pairwise():
            expected, _ = play(HollowFleet, seed, num_lanes, has_window=has_window, tenants=tenants)
        assert seats == expected, f"seed {seed}"
        num_starts += sum(len(starts) for _, _, starts, _, _ in seats)
    assert num_starts > 100


def test_many_lanes_serve_all_requests() -> None:
    for seed in range(2):
        _, fleet = play(QuietFleet, seed, 7, has_window=False, tenants=seed % 2 * 2)
        fleet.check_content()
        fleet.check_all_ended()


def test_a_request_starts_in_one_tick_beside_a_lane_that_gets_room_in_it() -> None:
    """Found by the simulation: a leaves the request to c, because b has no room; b gets room; c leaves it to b."""
    fleet = Fleet(*[Shape(page_size=4, num_pages=200, max_rows=8, max_length=40, token_budget=64)] * 3)
    prompt = [1, 2, 3, 4, 5]
    fleet.submit([9, 9, 9, 9, 9], max_new_tokens=20, ignore_eos=True)
    fleet.tick()
    for _ in range(2):
        fleet.submit(prompt, max_new_tokens=9, ignore_eos=True)
        fleet.tick()
    assert [len(fleet.running(name)) for name in "abc"] == [1, 1, 1]
    fleet.run()
    fleet.lane_of("b").schedule.blocked = 0, 0
    stream = fleet.submit(prompt, max_new_tokens=9, ignore_eos=True)
    fleet.tick()
    assert [fleet.running(name) for name in "abc"].count([stream]) == 1
