"""Requests that outlive their reader: detaching, resuming, second readers, linger time, bounds, and the journal."""

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.names import meant
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.sent_plans import load
from tests.scheduler_svc.core.world import FRONTEND, SECRET, World, greedy, prompt

OTHER = "f-2"


def world_with_two_frontends() -> World:
    world = World()
    world.handle(ev.FrontendJoined(frontend=OTHER))
    return world


@pytest.mark.parametrize(
    ("reader", "how"),
    [
        (OTHER, ev.FrontendLost(frontend=FRONTEND)),
        (OTHER, ev.Cancel(frontend=FRONTEND, stream=1, detach=True)),
        (FRONTEND, ev.FrontendJoined(frontend=FRONTEND)),
    ],
    ids=["front end", "connection", "front end that joins again"],
)
def test_a_detached_request_goes_on_and_its_new_reader_gets_every_token(reader: str, how: ev.Event) -> None:
    world = world_with_two_frontends()
    stream = world.submit(prompt(5), max_new_tokens=12, ignore_eos=True, linger_seconds=60.0)
    world.steps(4)
    seen = list(world.streams[stream].tokens)
    assert seen
    world.handle(how)
    world.steps(4)
    assert world.streams[stream].tokens == seen
    again = world.resume(stream, frontend=reader)
    assert world.streams[again].tokens[: len(seen)] == seen
    assert len(world.streams[again].tokens) == len(seen) + 4
    world.run()
    assert len(world.streams[again].tokens) == 12
    assert world.end(again).reason is fx.EndReason.LENGTH
    world.check_content()
    world.check_empty()


def test_an_answer_is_kept_for_the_linger_time_after_its_end() -> None:
    world = world_with_two_frontends()
    stream = world.submit(prompt(5), max_new_tokens=6, ignore_eos=True, linger_seconds=60.0)
    world.run()
    assert world.streams[stream].end is not None
    world.tick(59.0)
    again = world.resume(stream, frontend=OTHER)
    assert world.streams[again].tokens == world.streams[stream].tokens
    assert world.end(again).stats == world.end(stream).stats
    # The time begins again, because the caller was there.
    world.tick(59.0)
    assert world.streams[world.resume(stream)].end is not None
    world.tick(60.0)
    assert len(world.core.kept) == 0
    rejected = world.refusal(world.resume(stream))
    assert rejected.code is fx.RejectCode.NOT_FOUND
    assert [effect.request_id for effect in world.told(fx.Forgotten)] == ["r1"]


def test_a_detached_request_is_freed_when_its_time_is_over(world: World) -> None:
    stream = world.submit(prompt(5), max_new_tokens=12, ignore_eos=True, linger_seconds=5.0)
    world.steps(3)
    world.cancel(stream, detach=True)
    assert world.core.next_wake() == world.now + 5.0
    world.tick(4.9)
    assert len(world.core.queue) == 1
    world.tick(0.1)
    world.check_empty()
    assert len(world.core.kept) == 0


def test_a_resumed_request_does_not_expire(world: World) -> None:
    stream = world.submit(prompt(5), max_new_tokens=12, ignore_eos=True, linger_seconds=5.0)
    world.steps(3)
    world.cancel(stream, detach=True)
    world.tick(4.0)
    again = world.resume(stream)
    world.tick(4.0)
    world.run()
    assert len(world.streams[again].tokens) == 12


def test_a_second_reader_replaces_the_first() -> None:
    world = world_with_two_frontends()
    stream = world.submit(prompt(5), max_new_tokens=12, ignore_eos=True, num_samples=2, linger_seconds=60.0)
    world.steps(4)
    again = world.resume(stream, frontend=OTHER)
    assert world.told(fx.Replaced) == [fx.Replaced(frontend=FRONTEND, stream=stream)]
    world.run()
    # The first reader got nothing after it was replaced, as `Stream.take` checks.
    assert [len(world.streams[again + idx].tokens) for idx in range(2)] == [12, 12]
    world.check_content()


def test_the_loss_of_the_first_reader_does_not_touch_the_second() -> None:
    world = world_with_two_frontends()
    stream = world.submit(prompt(5), max_new_tokens=12, ignore_eos=True, linger_seconds=60.0)
    world.steps(4)
    again = world.resume(stream, frontend=OTHER)
    world.cancel(stream, detach=True)
    world.cancel(stream)
    world.handle(ev.FrontendLost(frontend=FRONTEND))
    world.run()
    assert len(world.streams[again].tokens) == 12


@pytest.mark.parametrize("known", [True, False])
def test_a_wrong_secret_and_an_unknown_id_have_the_same_answer(world: World, known: bool) -> None:
    stream = world.submit(prompt(5), linger_seconds=60.0 if known else 0.0)
    rejected = world.refusal(world.resume(stream, secret_hash=bytes(32) if known else SECRET))
    assert rejected.code is fx.RejectCode.NOT_FOUND
    assert "it was given up" in rejected.message
    assert not world.told(fx.Replaced)


def test_a_stop_string_that_was_found_before_the_break_is_kept(world: World) -> None:
    stream = world.submit(prompt(5), max_new_tokens=12, ignore_eos=True, linger_seconds=60.0)
    world.steps(6)
    world.handle(ev.Finish(frontend=FRONTEND, stream=stream, output_tokens=2))
    again = world.resume(stream)
    assert len(world.streams[again].tokens) == 2
    assert world.end(again).reason is fx.EndReason.STOP_STRING


def test_abort_ends_a_detached_request_and_drops_its_answer(world: World) -> None:
    live = world.submit(prompt(5), max_new_tokens=12, linger_seconds=60.0)
    over = world.submit(prompt(5, 1), max_new_tokens=1, linger_seconds=60.0)
    while world.streams[over].end is None:
        world.step()
    world.cancel(live, detach=True)
    [reply] = world.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=("r1", "r2")))[-1:]
    assert isinstance(reply, fx.AbortReply)
    assert reply.outcomes == (("r1", True), ("r2", False))
    assert len(world.core.kept) == 0
    world.run()
    world.check_empty()


def test_a_canceled_request_is_not_kept(world: World) -> None:
    stream = world.submit(prompt(5), num_samples=2, linger_seconds=60.0)
    world.steps(1)
    world.cancel(stream)
    assert len(world.core.kept) == 1
    world.cancel(stream + 1)
    assert len(world.core.kept) == 0


@pytest.mark.parametrize("limit", ["max_time_seconds", "deadline_seconds"])
def test_time_limits_end_detached_requests(world: World, limit: str) -> None:
    stream = world.submit(prompt(5), max_new_tokens=12, linger_seconds=60.0, **{limit: 3.0})
    world.steps(2)
    world.cancel(stream, detach=True)
    world.tick(3.0)
    world.check_empty()
    end = world.end(world.resume(stream))
    if limit == "max_time_seconds":
        assert end.reason is fx.EndReason.TIME_LIMIT
    else:
        assert end.failure is not None
        assert end.failure.code is fx.FailureCode.DEADLINE


def test_the_end_of_the_drain_ends_detached_requests(world: World) -> None:
    stream = world.submit(prompt(5), max_new_tokens=12, linger_seconds=60.0)
    world.cancel(stream, detach=True)
    world.handle(ev.DrainStarted())
    world.handle(ev.DrainEnded())
    world.check_empty()


def test_detached_requests_count_in_the_queue_and_in_the_load() -> None:
    world = World(config=CoreConfig(max_waiting=2), join=False)
    world.join()
    for salt in range(2):
        world.cancel(world.submit(prompt(3, salt), linger_seconds=60.0), detach=True)
    refused = world.refusal(world.submit(prompt(3, 2)))
    assert refused.code is fx.RejectCode.QUEUE_FULL
    assert load(world).waiting == 2


def test_the_id_of_a_live_request_is_taken_and_that_of_a_kept_answer_is_not(world: World) -> None:
    first = world.submit(prompt(5), max_new_tokens=3, request_id="mine", linger_seconds=60.0)
    world.cancel(first, detach=True)
    refused = world.refusal(world.submit(prompt(5), request_id="mine"))
    assert refused.code is fx.RejectCode.DUPLICATE
    world.run()
    assert len(world.core.kept) == 1
    second = world.submit(prompt(6), max_new_tokens=3, request_id="mine")
    assert world.streams[second].admitted
    assert len(world.core.kept) == 0


def test_the_oldest_answers_are_dropped_beyond_the_bounds() -> None:
    world = World(config=greedy(max_kept_requests=2))
    streams = [world.submit(prompt(3, salt), max_new_tokens=2, linger_seconds=60.0) for salt in range(4)]
    world.run()
    kept = [world.streams[world.resume(stream)].rejected is None for stream in streams]
    assert kept.count(True) == 2
    world = World(config=greedy(max_kept_bytes=2500))
    for salt in range(4):
        world.submit(prompt(3, salt), max_new_tokens=2, linger_seconds=60.0)
    world.run()
    assert len(world.core.kept) == 2
    assert world.core.kept.ended_bytes <= 2500


def test_detached_output_is_reported_to_a_journal() -> None:
    world = World(config=greedy(report_detached=True))
    stream = world.submit(prompt(5), max_new_tokens=6, ignore_eos=True, num_samples=2, linger_seconds=60.0)
    plain = world.submit(prompt(4, 1), max_new_tokens=6, ignore_eos=True)
    world.steps(3)
    world.cancel(stream, detach=True)
    [detached] = world.told(fx.Detached)
    count = len(world.effects)
    world.run()
    reported = [effect for effect in world.effects[count:] if isinstance(effect, fx.StepOutput) and not effect.frontend]
    for idx in range(2):
        tokens = list(world.streams[stream + idx].tokens)
        for output in reported:
            tokens += output.tokens[output.streams == detached.stream + idx].tolist()
        assert tokens == list(world.streams[stream + idx].expected(world.shape).tokens)
    assert sum(len(output.ends) for output in reported) == 2
    assert len(world.streams[plain].tokens) == 6


def test_a_restored_request_ends_if_its_tokens_have_ended_it() -> None:
    before = World()
    stream = before.submit(prompt(5), max_new_tokens=4, ignore_eos=True, linger_seconds=60.0)
    before.run()
    # The journal lost the end.
    before.streams[stream].end = None
    after = World(join=False)
    after.restore(stream, before)
    assert after.refusal(after.resume(stream)).code is fx.RejectCode.NOT_READY
    after.join()
    end = after.end(after.resume(stream))
    assert end.reason is fx.EndReason.LENGTH
    assert end.stats.output_tokens == 4
    after.check_empty()


def test_a_restored_request_that_no_worker_can_hold_waits_for_one() -> None:
    before = World()
    stream = before.submit(prompt(20), max_new_tokens=4, linger_seconds=60.0)
    after = World(Shape(max_length=16), join=False)
    after.restore(stream, before)
    after.join()
    again = after.resume(stream)
    after.tick(CoreConfig().max_worker_wait_seconds - 1.0)
    assert after.streams[again].end is None
    after.tick(1.0)
    failure = after.failure(again)
    assert failure.code is fx.FailureCode.NO_WORKER


def test_a_restored_request_expires_also_before_a_worker_joins() -> None:
    before = World()
    stream = before.submit(prompt(5), linger_seconds=60.0)
    after = World(join=False)
    after.restore(stream, before, linger_seconds=2.0)
    after.tick(2.0)
    after.join()
    assert len(after.core.queue) == len(after.core.kept) == 0


def test_the_time_before_the_restart_counts() -> None:
    before = World()
    stream = before.submit(prompt(5), max_new_tokens=12, linger_seconds=60.0, max_time_seconds=10.0)
    after = World(join=False)
    after.restore(stream, before, age_seconds=8.0)
    after.join()
    after.tick(2.0)
    assert after.end(after.resume(stream)).reason is fx.EndReason.TIME_LIMIT


def test_a_resume_takes_other_forms_of_an_id(world: World) -> None:
    stream = world.submit(prompt(5), max_new_tokens=12, linger_seconds=60.0)
    world.cancel(stream, detach=True)
    given, others = "cmpl-R1", meant("cmpl-R1", "")[1:]
    resume = ev.Resume(frontend=FRONTEND, stream=90, request_id=given, secret_hash=SECRET, others=others)
    [resumed] = [each for each in world.core.handle(resume, world.now) if isinstance(each, fx.Resumed)]
    assert (resumed.request_id, resumed.stream) == ("r1", 90)


def test_the_abort_of_a_request_from_the_journal_that_waits_for_a_worker_is_told() -> None:
    before = World()
    stream = before.submit(prompt(5), max_new_tokens=20, linger_seconds=60.0)
    before.steps(3)
    after = World(before.shape, join=False)
    after.restore(stream, before)
    for is_live in (True, False):
        [reply] = after.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=("r1",)))[-1:]
        assert isinstance(reply, fx.AbortReply)
        assert reply.outcomes == (("r1", is_live),)
    assert len(after.core.kept) == 0
