"""The report to the caller of a request that makes no progress: the reason, once, and at most once a second."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import TenantLimits, TenantsChanged
from scheduler_svc.core.messages.reports import WaitReason
from scheduler_svc.core.waits import LOOK_SECONDS
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=40, max_rows=1, max_length=64)
SMALL = Shape(page_size=4, num_pages=40, max_rows=4, max_length=40)
LARGE = replace(SMALL, max_length=100)


def told(world: World) -> list[tuple[int, WaitReason]]:
    """Stream and reason of each message since the last call."""
    waits = [wait for effect in world.effects if isinstance(effect, fx.Waits) for wait in effect.waits]
    world.effects.clear()
    return [(stream, wait.reason) for wait in waits for stream in wait.streams]


def ask(world: World, **options: object) -> int:
    return world.submit([1, 2, 3], **{"max_new_tokens": 30, "ignore_eos": True, **options})  # pyright: ignore[reportArgumentType]


def test_a_service_that_computes_at_once_tells_nothing(world: World) -> None:
    for _ in range(5):
        ask(world, max_new_tokens=4)
        world.run()
        world.tick(2 * LOOK_SECONDS)
    assert told(world) == []
    wake = world.core.next_wake()
    assert wake is None or wake > world.now


def lose_worker(world: World) -> int:
    stream = ask(world)
    world.step()
    world.kill()
    return stream


def queue_up(world: World) -> int:
    ask(world)
    world.step()
    return ask(world)


@pytest.mark.parametrize(
    ("act", "reason", "is_told_at_once"),
    [(lose_worker, WaitReason.WORKER_LOST, True), (queue_up, WaitReason.QUEUE, False)],
)
def test_a_wait_is_told_once(act: Callable[[World], int], reason: WaitReason, is_told_at_once: bool) -> None:
    world = World(SHAPE, config=greedy(silence_timeout_seconds=1e6, step_timeout_seconds=1e6))
    stream = act(world)
    world.tick()
    assert told(world) == ([(stream, reason)] if is_told_at_once else [])
    # The core asks for the Tick in which it reports.
    if not is_told_at_once:
        wake = world.core.next_wake()
        assert wake is not None and wake <= world.now + LOOK_SECONDS
        world.tick(wake - world.now)
        world.tick(LOOK_SECONDS)
        assert (stream, reason) in told(world)
    for _ in range(20):
        world.tick(0.5)
    assert stream not in [number for number, _ in told(world)]
    assert len(world.core.queue) > 0


def test_a_running_answer_is_told_and_told_again_when_the_reason_changes() -> None:
    """The worker dies in the middle of an answer, another one joins, takes the request, and computes it again."""
    fleet = Fleet(LARGE, config=greedy(prove_workers=True))
    fleet.run()
    stream = ask(fleet)
    fleet.steps(5, 0.01)
    num_tokens = len(fleet.streams[stream].tokens)
    assert num_tokens and told(fleet) == []
    fleet.lose("a")
    fleet.tick()
    assert told(fleet) == [(stream, WaitReason.WORKER_LOST)]
    fleet.join_as(LARGE)
    fleet.tick(0.1)
    # Its caller got a report less than a second ago.
    assert told(fleet) == []
    fleet.tick(LOOK_SECONDS)
    assert told(fleet) == [(stream, WaitReason.WORKER_STARTING)]
    fleet.step()
    fleet.tick(LOOK_SECONDS)
    assert told(fleet) == [(stream, WaitReason.COMPUTING)] and len(fleet.streams[stream].tokens) == num_tokens
    fleet.run()
    assert told(fleet) == []
    fleet.check_all_ended()


def too_large(fleet: Fleet) -> int:
    stream = ask(fleet, max_new_tokens=80)
    fleet.step()
    fleet.join_as(SMALL)
    fleet.step()
    fleet.lose("a")
    return stream


def suspected(fleet: Fleet) -> int:
    streams = [ask(fleet), fleet.submit([2, 1], max_new_tokens=30, ignore_eos=True)]
    fleet.step()
    fleet.tick()
    fleet.lose("a")
    fleet.join_as(LARGE)
    fleet.tick()
    # One half of the suspects is tried, the other waits.
    [waiting] = [one for one in fleet.core.queue if not one.row]
    assert waiting.stream in streams
    return waiting.stream


def awaits_constraint(fleet: Fleet) -> int:
    fleet.holds_answers = True
    stream = fleet.submit([1, 2, 3], constraint=b"a toy, toy_complete=6")
    fleet.step()
    return stream


def shares(fleet: Fleet) -> int:
    fleet.handle(TenantsChanged(limits={"acme": TenantLimits(row_share=0.25)}))
    ask(fleet, tenant="acme")
    fleet.step()
    return ask(fleet, tenant="acme")


def slow(fleet: Fleet) -> int:
    stream = ask(fleet)
    fleet.step()
    return stream


@pytest.mark.parametrize(
    ("reason", "act"),
    [
        (WaitReason.NO_LARGE_WORKER, too_large),
        (WaitReason.SUSPECT, suspected),
        (WaitReason.CONSTRAINT, awaits_constraint),
        (WaitReason.TENANT_SHARE, shares),
        (WaitReason.SLOW_STEP, slow),
    ],
)
def test_each_reason_of_one_request_is_told(reason: WaitReason, act: Callable[[Fleet], int]) -> None:
    fleet = Fleet(LARGE, config=greedy(silence_timeout_seconds=1e6, step_timeout_seconds=1e6))
    stream = act(fleet)
    for _ in range(6):
        fleet.tick(LOOK_SECONDS / 2)
    assert (stream, reason) in told(fleet)


def test_samples_of_one_request_speak_once_and_not_while_one_of_them_runs() -> None:
    world = World(SHAPE, config=greedy(silence_timeout_seconds=1e6, step_timeout_seconds=1e6))
    stream = ask(world, num_samples=3)
    world.steps(5, 1.0)
    assert told(world) == []
    world.kill()
    world.tick(LOOK_SECONDS)
    assert told(world) == [(stream, WaitReason.WORKER_LOST)]


def test_another_reader_is_told_again(world: World) -> None:
    stream = ask(world, linger_seconds=100.0)
    world.step()
    world.kill()
    world.tick()
    assert told(world) == [(stream, WaitReason.WORKER_LOST)]
    world.cancel(stream, detach=True)
    for _ in range(3):
        world.tick(LOOK_SECONDS)
    assert told(world) == []
    again = world.resume(stream)
    world.tick(LOOK_SECONDS)
    assert told(world) == [(again, WaitReason.WORKER_LOST)]


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"deadline_seconds": 5.0}, fx.FailureCode.DEADLINE),
        ({"max_queue_seconds": 5.0}, fx.FailureCode.DEADLINE),
        ({}, fx.FailureCode.NO_WORKER),
    ],
    ids=["deadline", "time in the queue", "wait for a worker"],
)
def test_the_end_of_a_wait_names_what_the_request_was_waiting_for(
    options: dict[str, float], code: fx.FailureCode
) -> None:
    world = World(SHAPE, config=greedy(max_worker_wait_seconds=10.0))
    world.kill()
    stream = ask(world, **options)
    world.tick()
    world.tick(5.0 if options else 10.0)
    failure = world.failure(stream)
    assert failure.code is code
    assert failure.message.endswith("; it was waiting: no worker is connected; the last one, w-1, was lost: killed")


def test_a_time_limit_before_the_first_token_is_told_with_its_reason() -> None:
    world = World(SHAPE, config=greedy(silence_timeout_seconds=1e6, step_timeout_seconds=1e6))
    running = ask(world, max_time_seconds=0.4)
    world.step()
    waiting = ask(world, max_time_seconds=0.4, num_samples=3)
    world.tick()
    assert told(world) == []
    world.tick(0.4)
    assert {world.end(each).reason for each in (running, waiting)} == {fx.EndReason.TIME_LIMIT}
    # Before the end.
    kinds = [type(effect) for effect in world.effects if isinstance(effect, fx.Waits | fx.StepOutput)]
    assert kinds == [fx.Waits, fx.StepOutput]
    assert told(world) == [(waiting, WaitReason.QUEUE)]


def test_requests_of_a_lost_front_end_are_told_nothing(world: World) -> None:
    ask(world, linger_seconds=100.0)
    world.step()
    world.kill()
    world.handle(ev.FrontendLost(frontend="f-1"))
    for _ in range(3):
        world.tick(LOOK_SECONDS)
    assert told(world) == [] and len(world.core.queue) == 1
