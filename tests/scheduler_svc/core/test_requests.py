"""Whole requests with their content checked: small pools, page edges, lost workers, failing steps, deadlines."""

import itertools

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages import names
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import FRONTEND, World, greedy, prompt


def test_one_request_runs_to_its_end() -> None:
    world = World()
    stream = world.submit(prompt(5), max_new_tokens=12)
    world.finish()
    assert world.streams[stream].end is not None
    assert world.streams[stream].tokens


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 4, 5])
def test_prompts_on_and_around_page_edges_complete(length: int, max_new_tokens: int) -> None:
    world = World(Shape(page_size=4, num_pages=9))
    world.submit(prompt(length), max_new_tokens=max_new_tokens, ignore_eos=True)
    world.finish()
    assert len(world.streams[1].tokens) == max_new_tokens


def test_a_sequence_as_large_as_the_pool_runs_together_with_others() -> None:
    world = World(Shape(page_size=4, num_pages=5, max_length=64))
    big = world.submit(prompt(9), max_new_tokens=8, ignore_eos=True)
    small = [world.submit(prompt(3, i), max_new_tokens=6, ignore_eos=True) for i in range(3)]
    world.finish()
    assert [len(world.streams[stream].tokens) for stream in (big, *small)] == [8, 6, 6, 6]


def test_a_pool_of_two_pages_serves_one_page_at_a_time() -> None:
    world = World(Shape(page_size=4, num_pages=2))
    for salt in range(3):
        world.submit(prompt(2, salt), max_new_tokens=3, ignore_eos=True)
    world.finish()
    assert [len(stream.tokens) for stream in world.streams.values()] == [3, 3, 3]


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


def test_preemption_takes_the_newest_request_and_counts_its_recomputed_tokens() -> None:
    world = World(Shape(page_size=4, num_pages=5, token_budget=64))
    first = world.submit(prompt(7), max_new_tokens=9, ignore_eos=True)
    second = world.submit(prompt(7, 1), max_new_tokens=9, ignore_eos=True)
    world.finish()
    ends = [world.streams[stream].end for stream in (first, second)]
    assert [end and end.stats.preemptions for end in ends] == [0, 1]
    assert world.core.counters.preemptions == 1
    assert ends[1] is not None
    assert ends[1].stats.recomputed_tokens > 0


def test_preemption_spares_a_newer_request_of_higher_priority() -> None:
    world = World(Shape(page_size=4, num_pages=5, token_budget=64))
    low = world.submit(prompt(7), max_new_tokens=9, ignore_eos=True)
    high = world.submit(prompt(7, 1), max_new_tokens=9, ignore_eos=True, priority=5)
    world.finish()
    ends = [world.streams[stream].end for stream in (low, high)]
    assert [end and end.stats.preemptions for end in ends] == [1, 0]


def test_requests_are_admitted_by_priority_then_arrival() -> None:
    world = World(Shape(max_rows=1))
    order = [world.submit(prompt(3, i), max_new_tokens=1, priority=p) for i, p in enumerate([0, 0, 3, -1, 3])]
    world.run()
    arrivals = [plan.starts[0].tokens.tolist() for plan in world.sent if plan.starts]
    expected = [order[i] for i in (2, 4, 0, 1, 3)]
    assert arrivals == [world.streams[stream].submit.prompt.tolist() for stream in expected]


def test_long_prompts_are_chunked_while_other_rows_decode() -> None:
    world = World(Shape(page_size=4, num_pages=64, token_budget=16, max_rows=4, chunk_align=4))
    world.submit(prompt(2), max_new_tokens=20, ignore_eos=True)
    world.tick()
    world.submit(prompt(50, 1), max_new_tokens=3, ignore_eos=True)
    world.finish()
    mixed = [plan for plan in world.sent if len(plan.chunk_rows) and len(plan.decode_rows)]
    assert len(mixed) >= 3
    for plan in world.sent:
        cost = len(plan.decode_rows) + sum(-(-int(count) // 4) * 4 for count in plan.chunk_counts)
        assert cost <= 16


@pytest.mark.parametrize("steps", range(14))
def test_a_worker_lost_at_any_step_loses_no_tokens(steps: int) -> None:
    world = World(Shape(page_size=4, num_pages=12, token_budget=12, max_rows=4))
    for salt in range(4):
        world.submit(prompt(3 + 5 * salt, salt), max_new_tokens=8, ignore_eos=True, temperature=salt % 2, seed=salt)
    world.steps(steps, 0.001)
    world.kill()
    assert world.is_lost
    world.join()
    world.finish()
    assert all(len(stream.tokens) == 8 for stream in world.streams.values())


@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("how", ["cancel", "abort", "finish", "frontend"])
def test_requests_ended_from_outside_in_any_phase_free_everything(steps: int, how: str) -> None:
    world = World(Shape(page_size=4, num_pages=7, token_budget=8, max_rows=3, chunk_align=2))
    streams = [world.submit(prompt(6 + salt, salt), max_new_tokens=6, ignore_eos=True) for salt in range(4)]
    for step in range(steps):
        world.tick(0.001)
        world.apply()
        if step % 3:
            world.deliver()
    for stream in streams[1:3]:
        match how:
            case "cancel":
                world.cancel(stream)
            case "abort":
                world.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=(f"r{stream}", "unknown")))
            case "finish":
                output_tokens = len(world.streams[stream].tokens)
                world.handle(ev.Finish(frontend=FRONTEND, stream=stream, output_tokens=output_tokens))
            case _:
                world.handle(ev.FrontendLost(frontend=FRONTEND))
    world.settle()
    if how in ("cancel", "abort", "finish"):
        assert all(len(world.streams[stream].tokens) == 6 for stream in (streams[0], streams[3]))


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


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_fails_once_loses_no_tokens(step: int) -> None:
    world = World(faults=Faults(fail_steps=frozenset({step})))
    for salt in range(4):
        world.submit(prompt(4, salt), max_new_tokens=6, ignore_eos=True)
    world.finish()
    assert all(len(stream.tokens) == 6 for stream in world.streams.values())
    assert world.core.counters.resets == 1


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_request_that_makes_every_step_fail_ends_alone(position: int) -> None:
    world = World(faults=Faults(fail_token=251))
    for i in range(4):
        world.submit([*prompt(4, i), 251] if i == position else prompt(5, i), max_new_tokens=6, ignore_eos=True)
    world.finish()
    ends = [stream.end for stream in world.streams.values()]
    assert [bool(end and end.failure) for end in ends] == [i == position for i in range(4)]
    culprit = ends[position]
    assert culprit is not None
    assert culprit.failure is not None
    assert culprit.failure.code is fx.FailureCode.INTERNAL
    assert f"r{position + 1}" in culprit.failure.message
    # The first failure has four suspects and the second two; then the culprit fails alone twice.
    assert world.core.counters.resets <= 4


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


def test_nonfinite_logits_end_only_their_request() -> None:
    world = World(Shape(page_size=4, num_pages=16), join=False)
    poison = prompt(5, 9)
    world.join(Faults(nonfinite_token=poison[-1]))
    victim = world.submit(poison, max_new_tokens=6)
    others = [world.submit([1, 2, 3 + i], max_new_tokens=6, ignore_eos=True) for i in range(3)]
    world.settle()
    failure = world.fault(victim)
    assert "r1" in failure
    assert all(len(world.streams[stream].tokens) == 6 for stream in others)
    assert any(len(plan.zero_pages) for plan in world.sent)


def test_a_request_that_reaches_the_maximum_length_ends_with_context_full() -> None:
    world = World(Shape(page_size=4, num_pages=20, max_length=12))
    cut = world.submit(prompt(9), max_new_tokens=4, ignore_eos=True)
    whole = world.submit(prompt(9, 1), max_new_tokens=3, ignore_eos=True)
    world.run()
    assert (world.end(cut).reason, len(world.streams[cut].tokens)) == (fx.EndReason.CONTEXT_FULL, 3)
    assert (world.end(whole).reason, len(world.streams[whole].tokens)) == (fx.EndReason.LENGTH, 3)


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


def test_two_front_ends_get_only_their_own_output() -> None:
    world = World()
    world.handle(ev.FrontendJoined(frontend="f-2"))
    mine = world.submit(prompt(4), ignore_eos=True)
    submit = world.streams[mine].submit
    fields = {name: getattr(submit, name) for name in submit.__slots__}
    theirs = ev.Submit(**fields | {"frontend": "f-2", "request_id": "theirs", "stream": mine})
    for effect in world.core.handle(theirs, world.now):
        assert isinstance(effect, fx.Admitted)
    outputs: list[fx.StepOutput] = []
    for _ in range(12):
        for effect in itertools.chain(world.core.handle(ev.Tick(), world.now)):
            if isinstance(effect, fx.SendPlan):
                world.plans.append(effect.plan)
        if world.apply():
            message = world.results.popleft()
            event = worker_wire.event_of(pb.WorkerToCore(result=message), world.worker)
            outputs += [e for e in world.core.handle(event, world.now) if isinstance(e, fx.StepOutput)]
    for frontend in (FRONTEND, "f-2"):
        own = [output for output in outputs if output.frontend == frontend]
        assert [token for output in own for token in output.tokens.tolist()] == list(
            world.streams[mine].expected(world.shape).tokens
        )
        assert sum(len(output.ends) for output in own) == 1


def test_a_page_to_be_zeroed_by_a_failed_step_is_zeroed_by_a_later_one() -> None:
    shape = Shape(page_size=2, num_pages=7, max_rows=1, token_budget=4, max_length=24)
    world = World(shape, faults=Faults(fail_steps=frozenset({3}), nonfinite_token=272))
    poisoned = world.submit([0, 1, 0, 1, 0, 1, 272], max_new_tokens=1)
    world.submit([0], max_new_tokens=9, ignore_eos=True)
    world.finish()
    world.fault(poisoned)
    generations = {plan.generation for plan in world.sent if len(plan.zero_pages)}
    assert len(generations) == 2
