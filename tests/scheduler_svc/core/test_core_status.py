"""The core's status, by which front ends refuse requests: a full queue, workers that crash in a loop."""

from scheduler_svc.core.front_ends import RETRY_CHANGE
from scheduler_svc.core.lanes import DEATHS, WINDOW_SECONDS
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import WaitReason
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.sent_plans import load
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

SHAPE = Shape(max_rows=2, max_length=64)


def statuses(world: World) -> list[fx.CoreStatus]:
    """Returns the statuses that front ends were sent since the last call."""
    sent = world.told(fx.CoreStatus)
    world.effects.clear()
    return sent


def crash(world: World, times: int, seconds: float = 1.0) -> None:
    """Lets workers die before they get a plan."""
    for _ in range(times):
        world.kill()
        world.tick(seconds)
        world.join()


def test_the_start_and_end_of_a_full_queue_are_announced_once() -> None:
    world = World(SHAPE, config=greedy(max_waiting=2))
    for i in range(4):
        world.submit([i], max_new_tokens=8, ignore_eos=True)
        world.tick()
    world.submit([9])
    world.tick()
    sent = [status.queue_full for status in statuses(world)]
    assert sent[-1] == "2 requests are waiting; the limit is 2 (max_waiting)"
    assert [bool(text) for text in sent if text] == [True]
    world.run()
    assert [(status.queue_full, status.places) for status in statuses(world)] == [("", 0)]
    world.check_all_ended()


def test_front_ends_learn_how_many_places_a_queue_has_that_is_no_longer_full() -> None:
    world = World(SHAPE, config=greedy(max_waiting=8))
    for i in range(10):
        world.submit([i], max_new_tokens=8, ignore_eos=True)
        world.tick()
    assert statuses(world)[-1].places == 0
    told, free = list[int](), list[int]()
    while world.core.queue.num_waiting:
        world.step(0.01)
        told += [status.places for status in statuses(world) if not status.queue_full]
        free.append(8 - world.core.queue.num_waiting)
    # One row ends after the other; nobody is refused when half of the queue is free.
    assert told == [1, 2, 0] and set(free) == set(range(9))
    world.handle(ev.FrontendJoined(frontend="late"))
    world.submit([0], max_new_tokens=8)
    world.run()
    assert not any(status.places for status in statuses(world))


def test_front_ends_share_the_places() -> None:
    world = World(Shape(max_rows=3, max_length=64), config=greedy(max_waiting=8))
    for name in ("second", "third"):
        world.handle(ev.FrontendJoined(frontend=name))
    for count in (3, 8):
        for i in range(count):
            world.submit([i], max_new_tokens=8, ignore_eos=True)
        world.tick()
    assert all(status.queue_full for status in statuses(world)[-3:])
    while not (told := statuses(world)):
        world.step(0.01)
    # Three rows end together, and three of the eight that waited start.
    assert world.core.queue.num_waiting == 5
    assert sorted((status.frontend, status.places) for status in told) == [(FRONTEND, 1), ("second", 1), ("third", 1)]


def test_front_ends_hear_of_places_again_when_as_many_requests_have_started() -> None:
    """So that rows are not empty because a front end has let in as many as it was told."""
    world = World(SHAPE, config=greedy(max_waiting=8))
    for i in range(10):
        world.submit([i], max_new_tokens=4, ignore_eos=True)
        world.tick()
    may_send, num_sent = 0, 0
    for _ in range(200):
        world.step(0.01)
        for status in statuses(world):
            may_send = status.places
        for _ in range(may_send):
            world.submit([1], max_new_tokens=4, ignore_eos=True)
        num_sent += may_send
        may_send = 0
        assert world.lane.rows.num_free <= 1 and world.core.queue.num_waiting >= 6
    assert num_sent > 50


def test_the_estimated_time_in_a_full_queue_is_told_and_told_again_when_it_has_changed() -> None:
    world = World(SHAPE, config=greedy(max_waiting=4))
    for i in range(6):
        world.submit([i], max_new_tokens=40, ignore_eos=True)
        world.step(0.1)
    [full] = [status for status in statuses(world) if status.queue_full]
    assert full.retry_seconds == world.core.queue.drain.seconds(4, 4, world.now)
    # Two requests have left the queue, and no other one does for a long time.
    told = [full.retry_seconds]
    for _ in range(30):
        world.step(0.5)
        told += [status.retry_seconds for status in statuses(world)]
        now = world.core.queue.drain.seconds(4, 4, world.now)
        assert now / RETRY_CHANGE <= told[-1] <= now * RETRY_CHANGE
    assert 5 <= len(told) <= 10
    assert told == sorted(told)
    world.run()
    assert {status.retry_seconds for status in statuses(world) if not status.queue_full} == {0.0}


def test_many_waiting_tokens_fill_the_queue() -> None:
    world = World(SHAPE, config=greedy(max_waiting_tokens=20))
    for _ in range(3):
        world.submit([1] * 20, max_new_tokens=2)
        world.tick()
    assert statuses(world)[-1].queue_full == "20 tokens are waiting; the limit is 20 (max_waiting_tokens)"


def test_rows_stay_full_while_the_queue_is_announced_as_full() -> None:
    world = World(SHAPE, config=greedy(max_waiting=1))
    is_full = False
    for i in range(60):
        if not is_full:
            world.submit([i], max_new_tokens=3, ignore_eos=True)
        world.step(0.01)
        for status in statuses(world):
            is_full = bool(status.queue_full)
        # The status is as of the last plan. Results after it free rows, and the next plan fills them.
        if is_full:
            world.tick()
            assert world.lane.rows.num_free == 0 or not world.core.queue.num_waiting


def test_workers_lost_without_a_token_make_the_core_stop_serving(world: World) -> None:
    admitted = world.submit([1, 2], max_new_tokens=4, ignore_eos=True)
    crash(world, DEATHS - 1)
    assert not any(status.refuses for status in statuses(world))
    crash(world, 1)
    world.tick()
    [note] = [effect for effect in world.effects if isinstance(effect, fx.Note) and "serving" in effect.message]
    status = statuses(world)[-1]
    assert status.refuses and status.reason is WaitReason.CRASH_LOOP
    assert note.message == f"not serving: {status.not_serving}"
    assert status.not_serving == (
        "workers crash in a loop: 5 died within 60 s and no token was computed in between; the last one: killed; "
        "requests are accepted again after the next token, or 60 s after the first of these deaths"
    )
    refused = world.refusal(world.submit([3]))
    assert (refused.code, refused.message) == (fx.RejectCode.NOT_READY, status.not_serving)
    # The admitted request stays, and its first token ends the state.
    world.run()
    assert statuses(world)[-1].not_serving == ""
    assert len(world.streams[admitted].tokens) == 4


def test_an_idle_core_serves_again_when_the_window_has_passed() -> None:
    world = World(SHAPE, config=greedy(silence_timeout_seconds=1e6))
    crash(world, DEATHS)
    world.tick()
    assert statuses(world)[-1].not_serving
    world.tick(WINDOW_SECONDS)
    assert statuses(world)[-1].not_serving == ""


def test_workers_that_announce_their_stop_do_not_make_a_crash_loop(world: World) -> None:
    for _ in range(2 * DEATHS):
        world.handle(ev.WorkerLost(worker=world.worker, reason="it stops", is_orderly=True))
        world.join()
        world.tick(0.1)
    assert not any(status.refuses for status in statuses(world))


def test_workers_lost_at_long_intervals_do_not_make_a_crash_loop() -> None:
    world = World(SHAPE, config=greedy(silence_timeout_seconds=1e6))
    crash(world, 2 * DEATHS, seconds=WINDOW_SECONDS / (DEATHS - 1) + 1)
    assert not any(status.refuses for status in statuses(world))


def test_the_load_reports_the_last_lost_worker(world: World) -> None:
    assert (load(world).worker_lost_seconds, load(world).worker_lost_reason) == (None, "")
    world.kill()
    world.tick(12.5)
    assert (load(world).worker_lost_seconds, load(world).worker_lost_reason) == (12.5, "killed")
