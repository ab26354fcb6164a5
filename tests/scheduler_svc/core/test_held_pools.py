"""The load report's figures of pools that outlive their workers."""

from dataclasses import replace

import pytest

from scheduler_svc.core.messages.reports import HeldPoolsLoad
from scheduler_svc.core.recovery.held_pools import HOLD_SECONDS
from tests.rigs.executor import Shape
from tests.rigs.page_pool import Slots
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.sent_plans import load

SHAPE = Shape(page_size=4, num_pages=100, max_rows=8, max_length=120, token_budget=64, vocab_size=300)
POOL_BYTES = 7 << 20


class SharingFleet(Fleet):
    """Its workers have pools of POOL_BYTES in memory that outlives them."""

    def __init__(self) -> None:
        self.memory: dict[bytes, Slots] = {}
        super().__init__()

    def share(self, name: str) -> None:
        """Lets a worker with a pool of its own join."""
        self.join_as(SHAPE, name=name, pool_id=name.encode(), shared=self.memory, info={"pool_bytes": POOL_BYTES})

    def kill(self, name: str) -> None:
        """Kills a worker; its memory outlives it."""
        executor = self.lose(name).executor
        self.memory[executor.pool_id] = executor.memory

    @property
    def held(self) -> HeldPoolsLoad:
        return load(self).held_pools


@pytest.fixture
def fleet() -> SharingFleet:
    """Its worker was killed. Four streams of 20 tokens have run, so that full pages are cached, and four more run."""
    fleet = SharingFleet()
    fleet.share("a")
    for _ in range(2):
        for i in range(4):
            fleet.submit([i, 1, 2, 3, 4], max_new_tokens=20, ignore_eos=True)
        fleet.steps(12, 0.001)
    fleet.kill("a")
    return fleet


def test_a_pool_is_held_until_a_worker_takes_it_over(fleet: SharingFleet) -> None:
    held = fleet.held
    assert (held.pools, held.bytes) == (1, POOL_BYTES) and held.pages > 4
    fleet.share("b")
    fleet.run()
    assert fleet.held == HeldPoolsLoad(taken_over=1, pages_kept=held.pages)
    fleet.check_all_ended()


def test_a_pool_that_the_worker_cannot_map_does_not_count_as_taken_over(fleet: SharingFleet) -> None:
    fleet.memory.clear()
    fleet.share("b")
    fleet.run()
    assert fleet.held == HeldPoolsLoad()
    fleet.check_all_ended()


def test_damaged_pages_are_counted(fleet: SharingFleet) -> None:
    fleet.share("b")
    while not fleet.plans_of["b"]:
        fleet.tick(0.001)
    fleet.apply_plans("b")
    result = fleet.workers["b"].event_of(fleet.workers["b"].results.popleft())
    fleet.handle(replace(result, damaged_pages=2))
    assert fleet.held.damaged_pages == 2


def test_a_pool_that_nobody_takes_is_dropped_from_the_report(fleet: SharingFleet) -> None:
    fleet.tick(HOLD_SECONDS + 1)
    assert fleet.held == HeldPoolsLoad()


def test_a_worker_that_joins_again_keeps_its_pool_from_a_lane_that_would_take_it_over(fleet: SharingFleet) -> None:
    fleet.share("b")
    lane = fleet.lane_of("b")
    while lane.pages.pending is None:
        fleet.deliver_from("b") if fleet.workers["b"].results else fleet.apply_plans("b") or fleet.tick(0.001)
    assert lane.pool.num_cached
    # The worker was only silent: its pool is its own again, and the core has ordered it to zero the pool.
    fleet.share("a")
    assert lane.pages.pending is None and not lane.pool.num_cached and lane.pages.pool_id == b"b"
    fleet.lose("b")
    fleet.kill("a")
    assert fleet.held.pools == 0
    fleet.share("c")
    fleet.settle()
    fleet.check_all_ended()
