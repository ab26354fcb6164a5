"""Whole requests with their content checked: small pools, page edges, lost workers, failing steps, deadlines."""

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages import names
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import FRONTEND, World, greedy, prompt


def test_a_request_that_can_never_fit_is_rejected_with_the_numbers() -> None:
    world = World(Shape(page_size=4, num_pages=5, max_length=40))
    too_long, too_big = world.submit(prompt(40), max_new_tokens=1), world.submit(prompt(10), max_new_tokens=8)
    fits = world.submit(prompt(10), max_new_tokens=7, ignore_eos=True)
    rejected = [world.streams[stream].rejected for stream in (too_long, too_big)]
    assert [answer and answer.code for answer in rejected] == [fx.RejectCode.INVALID] * 2
    assert [answer and answer.message for answer in rejected] == [
        "the prompt and one output token make 41 tokens; the limit is 40",
        "prompt (10 tokens) and max_new_tokens (8) take 5 pages of 4 tokens; the pool has 4",
    ]
    world.run()
    assert len(world.streams[fits].tokens) == 7


def test_the_maximum_number_of_rows_runs_at_once() -> None:
    world = World(Shape(max_rows=5, token_budget=64, num_pages=64))
    for salt in range(7):
        world.submit(prompt(3, salt), max_new_tokens=6, ignore_eos=True)
    world.tick()
    assert len(world.sent[0].starts) == 5
    assert sorted(start.row for start in world.sent[0].starts) == [1, 2, 3, 4, 5]
    world.finish()


@pytest.mark.parametrize(("priority", "preempted"), [(0, [0, 1]), (5, [1, 0])], ids=["the newest", "the less urgent"])
def test_preemption_takes_one_request_and_counts_its_recomputed_tokens(priority: int, preempted: list[int]) -> None:
    world = World(Shape(page_size=4, num_pages=5, token_budget=64))
    first = world.submit(prompt(7), max_new_tokens=9, ignore_eos=True)
    second = world.submit(prompt(7, 1), max_new_tokens=9, ignore_eos=True, priority=priority)
    world.finish()
    stats = [world.end(stream).stats for stream in (first, second)]
    assert [each.preemptions for each in stats] == preempted
    assert world.core.counters.preemptions == 1
    assert stats[preempted.index(1)].recomputed_tokens > 0


def test_requests_are_admitted_by_priority_then_arrival() -> None:
    world = World(Shape(max_rows=1))
    order = [world.submit(prompt(3, i), max_new_tokens=1, priority=p) for i, p in enumerate([0, 0, 3, -1, 3])]
    world.run()
    arrivals = [plan.starts[0].tokens.tolist() for plan in world.sent if plan.starts]
    expected = [order[i] for i in (2, 4, 0, 1, 3)]
    assert arrivals == [world.streams[stream].submit.prompt.tolist() for stream in expected]


def test_abort_answers_for_each_id_and_ends_the_stream() -> None:
    world = World()
    stream = world.submit(prompt(4), max_new_tokens=50, ignore_eos=True)
    world.tick()
    effects = world.handle(ev.Abort(frontend=FRONTEND, query=9, request_ids=("r1", "r2", "r1")))
    reply = next(effect for effect in effects if isinstance(effect, fx.AbortReply))
    assert (reply.query, reply.outcomes) == (9, (("r1", True), ("r2", False), ("r1", False)))
    end = world.end(stream)
    assert end.reason is fx.EndReason.ABORTED


def test_an_abort_takes_other_forms_of_an_id_and_prefers_the_id_itself() -> None:
    world = World()
    streams = [world.submit(prompt(4), max_new_tokens=50, ignore_eos=True, request_id=name) for name in ("a", "cmpl-a")]
    for given, ended in (("cmpl-A", 1), ("CMPL-A", 0)):
        others = {given: names.meant(given, "")[1:]}
        effects = world.handle(ev.Abort(frontend=FRONTEND, query=9, request_ids=(given,), others=others))
        assert [each.outcomes for each in effects if isinstance(each, fx.AbortReply)] == [((given, True),)]
        assert [world.end_of(stream) is None for stream in streams] == [ended > 0, False]
    assert world.end(streams[0]).reason is fx.EndReason.ABORTED


def test_finish_counts_discarded_tokens() -> None:
    world = World()
    stream = world.submit(prompt(4), max_new_tokens=50, ignore_eos=True)
    world.steps(6)
    delivered = len(world.streams[stream].tokens)
    assert delivered >= 4
    in_flight = sum(len(record.sampled) for record in world.lane.in_flight) if world.lane else 0
    world.handle(ev.Finish(frontend=FRONTEND, stream=stream, output_tokens=2))
    end = world.end(stream)
    assert (end.stats.output_tokens, end.stats.discarded_tokens) == (2, delivered - 2 + in_flight)


def test_a_full_queue_rejects_with_the_limit() -> None:
    world = World(Shape(max_rows=1), greedy(max_waiting=2, max_waiting_tokens=100))
    streams = [world.submit(prompt(4, salt)) for salt in range(3)]
    rejected = world.refusal(streams[2])
    assert (rejected.code, rejected.message) == (fx.RejectCode.QUEUE_FULL, "2 requests are waiting; the limit is 2")
    world.tick()
    long = world.submit(prompt(99))
    rejected = world.refusal(long)
    assert rejected.message == "4 tokens are waiting and the prompt has 99; the limit is 100"
    world.finish()


def test_a_live_request_id_is_rejected_until_its_request_ends() -> None:
    world = World()
    world.submit(prompt(3), request_id="same")
    twin = world.submit(prompt(3), request_id="same")
    rejected = world.refusal(twin)
    assert rejected.code is fx.RejectCode.DUPLICATE
    world.run()
    again = world.submit(prompt(3), request_id="same")
    assert world.streams[again].admitted


def test_requests_are_rejected_before_the_first_worker_and_wait_after_its_loss() -> None:
    world = World(join=False)
    early = world.submit(prompt(3))
    rejected = world.refusal(early)
    assert rejected.code is fx.RejectCode.NOT_READY
    world.join()
    world.kill()
    late = world.submit(prompt(3), ignore_eos=True)
    world.tick(5.0)
    assert world.streams[late].admitted
    assert not world.streams[late].end
    world.join()
    world.run()
    world.check_content()
    assert len(world.streams[late].tokens) == 4


def test_a_request_past_its_deadline_ends_before_it_is_planned() -> None:
    world = World(Shape(max_rows=1))
    running = world.submit(prompt(3), max_new_tokens=50, ignore_eos=True, max_time_seconds=2.0)
    waiting = world.submit(prompt(3, 1), deadline_seconds=1.0)
    world.tick()
    assert world.core.next_wake() == pytest.approx(1.0)
    world.tick(1.0)
    failure = world.failure(waiting)
    assert failure.code is fx.FailureCode.DEADLINE
    world.tick(1.0)
    end = world.end(running)
    assert end.reason is fx.EndReason.TIME_LIMIT
    planned = {tuple(start.tokens.tolist()) for plan in world.sent for start in plan.starts}
    assert tuple(prompt(3, 1)) not in planned


def test_a_drain_rejects_new_requests_and_its_end_ends_the_others() -> None:
    world = World()
    running = world.submit(prompt(4), max_new_tokens=100, ignore_eos=True)
    world.tick()
    world.handle(ev.DrainStarted())
    refused = world.submit(prompt(4))
    assert world.streams[refused].rejected is not None
    world.handle(ev.DrainEnded())
    failure = world.failure(running)
    assert failure.code is fx.FailureCode.SHUTDOWN
    world.check_empty()


def test_a_stop_token_counts_only_after_min_new_tokens() -> None:
    free = World()
    stream = free.submit(prompt(4), max_new_tokens=12, ignore_eos=True)
    free.run()
    tokens = free.streams[stream].tokens
    stop = tokens[3]
    first = tokens.index(stop)
    world = World()
    plain = world.submit(prompt(4), max_new_tokens=12, stop_token_ids=(stop,))
    later = world.submit(prompt(4), max_new_tokens=12, stop_token_ids=(stop,), min_new_tokens=first + 2)
    world.finish()
    assert world.streams[plain].tokens == tokens[: first + 1]
    assert len(world.streams[later].tokens) >= first + 2
    assert stop not in world.streams[later].tokens[: first + 2]


def test_a_page_to_be_zeroed_by_a_failed_step_is_zeroed_by_a_later_one() -> None:
    shape = Shape(page_size=2, num_pages=7, max_rows=1, token_budget=4, max_length=24)
    world = World(shape, faults=Faults(fail_steps=frozenset({3}), nonfinite_token=272))
    poisoned = world.submit([0, 1, 0, 1, 0, 1, 272], max_new_tokens=1)
    world.submit([0], max_new_tokens=9, ignore_eos=True)
    world.finish()
    world.fault(poisoned)
    generations = {plan.generation for plan in world.sent if len(plan.zero_pages)}
    assert len(generations) == 2
