"""Requests that no present worker can hold: how long they wait, how new ones are rejected, what callers see."""

from dataclasses import replace

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

LARGE = Shape(page_size=4, num_pages=40, max_length=100)
SMALL = replace(LARGE, num_pages=20, max_length=40)
WAIT = greedy(max_worker_wait_seconds=100.0, silence_timeout_seconds=1e6)


def served(world: World) -> list[tuple[int, int]]:
    """Returns (max_length, recent_max_length) of each ModelServed since the last call."""
    sent = world.told(fx.ModelServed)
    world.effects.clear()
    return [(effect.info.max_length if effect.info else 0, effect.recent_max_length) for effect in sent]


@pytest.fixture
def fleet() -> Fleet:
    """A large worker, "a", and a small one."""
    fleet = Fleet(LARGE, SMALL, config=WAIT)
    assert served(fleet)[-1] == (100, 100)
    return fleet


def test_front_ends_get_the_present_limits_when_the_larger_worker_leaves(fleet: Fleet) -> None:
    fleet.lose("a")
    assert served(fleet) == [(40, 100)]
    fleet.tick(99.0)
    assert served(fleet) == []
    assert fleet.core.next_wake() == pytest.approx(100.0)
    fleet.tick(1.0)
    assert served(fleet) == [(40, 40)]


def test_front_ends_get_the_larger_limits_when_the_larger_worker_is_back(fleet: Fleet) -> None:
    fleet.lose("a")
    served(fleet)
    fleet.join_as(LARGE)
    assert served(fleet) == [(100, 100)]


def test_the_limits_of_the_last_worker_stay_served_while_none_is_present() -> None:
    world = World(LARGE, config=WAIT)
    served(world)
    world.kill()
    world.tick(1000.0)
    assert world.core.info is not None and world.core.info.max_length == 100
    world.join()
    assert served(world) == []


def test_a_prompt_that_fits_only_a_lost_worker_is_rejected_as_not_ready_then_invalid(fleet: Fleet) -> None:
    fleet.lose("a")
    rejected = fleet.refusal(fleet.submit([1] * 50))
    assert rejected.code is fx.RejectCode.NOT_READY
    assert "54 tokens" in rejected.message and "hold at most 40" in rejected.message
    fleet.tick(100.0)
    rejected = fleet.refusal(fleet.submit([1] * 50))
    assert rejected.code is fx.RejectCode.INVALID
    assert rejected.message == "the prompt and one output token make 51 tokens; the limit is 40"


def test_an_output_that_fits_only_a_lost_worker_is_cut_only_after_the_wait(fleet: Fleet) -> None:
    fleet.lose("a")
    refused = fleet.refusal(fleet.submit([1] * 30, max_new_tokens=30))
    assert refused.code is fx.RejectCode.NOT_READY
    fleet.tick(100.0)
    # The larger worker no longer counts, so the output ends at the limit of the present one.
    stream = fleet.submit([1] * 30, max_new_tokens=30, ignore_eos=True)
    fleet.run()
    assert fleet.end(stream).reason is fx.EndReason.CONTEXT_FULL
    assert len(fleet.streams[stream].tokens) == 10


def test_a_running_request_keeps_its_tokens_and_fails_when_the_wait_is_over(fleet: Fleet) -> None:
    long = fleet.submit([1] * 50, max_new_tokens=40, ignore_eos=True)
    fleet.steps(5, 0.01)
    num_tokens = len(fleet.streams[long].tokens)
    assert num_tokens > 0
    fleet.lose("a")
    fleet.now += 99.0
    fleet.run()
    assert fleet.streams[long].end is None
    fleet.tick(2.0)
    failure = fleet.failure(long)
    assert failure.code is fx.FailureCode.NO_WORKER
    assert "90 tokens" in failure.message and "the limit is 100 s (max_worker_wait_seconds)" in failure.message
    assert "it was waiting: its 90 tokens" in failure.message
    assert len(fleet.streams[long].tokens) == num_tokens
    fleet.check_all_ended()


def test_the_wait_restarts_after_a_worker_could_hold_the_request(fleet: Fleet) -> None:
    long = fleet.submit([1] * 50, max_new_tokens=40, ignore_eos=True)
    fleet.lose("a")
    fleet.tick(60.0)
    back = fleet.join_as(LARGE)
    fleet.lose(back)
    fleet.tick(60.0)
    assert fleet.streams[long].end is None
    fleet.tick(40.0)
    assert fleet.end(long).failure is not None


def test_the_wait_of_a_request_has_one_deadline_although_many_workers_are_lost(fleet: Fleet) -> None:
    long = fleet.submit([1] * 50, max_new_tokens=40, ignore_eos=True)
    fleet.lose("a")
    for _ in range(20):
        fleet.lose(fleet.join_as(LARGE))
    assert len(fleet.core.queue._deadlines._heap) == 1
    fleet.join_as(LARGE)
    fleet.run()
    assert fleet.end(long).failure is None


def test_requests_wait_a_bounded_time_while_no_worker_is_present() -> None:
    world = World(LARGE, config=WAIT)
    world.kill()
    stream = world.submit([1, 2, 3])
    world.tick(99.0)
    assert world.streams[stream].admitted and world.streams[stream].end is None
    world.tick(2.0)
    failure = world.failure(stream)
    assert failure.code is fx.FailureCode.NO_WORKER


def test_a_new_front_end_gets_the_present_limits(fleet: Fleet) -> None:
    fleet.lose("a")
    fleet.tick(50.0)
    [model] = [e for e in fleet.handle(ev.FrontendJoined(frontend=FRONTEND)) if isinstance(e, fx.ModelServed)]
    assert model.info is not None
    assert (model.info.max_length, model.recent_max_length) == (40, 100)


def test_a_longer_worker_with_a_small_pool_does_not_cut_other_requests() -> None:
    """The length of a worker counts only as far as its own pool holds it, while it is present and after it left."""
    wide = replace(LARGE, num_pages=60, max_length=200)
    long = replace(LARGE, num_pages=11, max_length=400)
    fleet = Fleet(wide, config=WAIT)
    before = fleet.submit([1] * 150, max_new_tokens=1000, ignore_eos=True)
    fleet.run()
    name = fleet.join_as(long)
    beside = fleet.submit([2] * 150, max_new_tokens=1000, ignore_eos=True)
    fleet.run()
    fleet.lose(name)
    after = fleet.submit([3] * 150, max_new_tokens=1000, ignore_eos=True)
    fleet.run()
    assert [fleet.end(stream).reason for stream in (before, beside, after)] == [fx.EndReason.CONTEXT_FULL] * 3
    assert [len(fleet.streams[stream].tokens) for stream in (before, beside, after)] == [50] * 3
