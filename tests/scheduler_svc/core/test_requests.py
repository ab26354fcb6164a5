"""Whole requests with their content checked: small pools, page edges, lost workers, failing steps, deadlines."""

from dataclasses import replace

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages import names
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import FRONTEND, World, greedy, prompt, received


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


def test_an_abort_takes_other_forms_of_an_id_and_prefers_the_id_itself(world: World) -> None:
    streams = [world.submit(prompt(4), max_new_tokens=50, ignore_eos=True, request_id=name) for name in ("a", "cmpl-a")]
    for given, ended in (("cmpl-A", 1), ("CMPL-A", 0)):
        others = {given: names.meant(given, "")[1:]}
        effects = world.handle(ev.Abort(frontend=FRONTEND, query=9, request_ids=(given,), others=others))
        assert [each.outcomes for each in effects if isinstance(each, fx.AbortReply)] == [((given, True),)]
        assert [world.end_of(stream) is None for stream in streams] == [ended > 0, False]
    assert world.end(streams[0]).reason is fx.EndReason.ABORTED


def test_two_front_ends_may_use_the_same_number_for_a_stream(world: World) -> None:
    """Each gets its own output alone, and a cancel ends the stream of its front end."""
    world.handle(ev.FrontendJoined(frontend="f-2"))
    mine, cancelled = world.submit(prompt(4), ignore_eos=True), world.submit(prompt(5), ignore_eos=True)
    for stream in (mine, cancelled):
        theirs = replace(world.streams[stream].submit, frontend="f-2", request_id=f"theirs-{stream}")
        assert [type(effect) for effect in world.core.handle(theirs, world.now)] == [fx.Admitted]
    world.core.handle(ev.Cancel(frontend="f-2", stream=cancelled), world.now)
    outputs: list[fx.StepOutput] = []
    for _ in range(40):
        effects = world.core.handle(ev.Tick(), world.now)
        world.plans += [effect.plan for effect in effects if isinstance(effect, fx.SendPlan)]
        if world.apply():
            results = world.core.handle(received(world.worker, result=world.results.popleft()), world.now)
            outputs += [effect for effect in results if isinstance(effect, fx.StepOutput)]
    for frontend, streams in ((FRONTEND, [mine, cancelled]), ("f-2", [mine])):
        own = [output for output in outputs if output.frontend == frontend]
        found = {stream: list[int]() for stream in streams}
        for output in own:
            for stream, token in zip(output.streams.tolist(), output.tokens.tolist(), strict=True):
                found[stream].append(token)
        assert found == {stream: list(world.streams[stream].expected(world.shape).tokens) for stream in streams}
        assert sum(len(output.ends) for output in own) == len(streams)


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


def test_a_page_to_be_zeroed_by_a_failed_step_is_zeroed_by_a_later_one() -> None:
    shape = Shape(page_size=2, num_pages=7, max_rows=1, token_budget=4, max_length=24)
    world = World(shape, faults=Faults(fail_steps=frozenset({3}), nonfinite_token=272))
    poisoned = world.submit([0, 1, 0, 1, 0, 1, 272], max_new_tokens=1)
    world.submit([0], max_new_tokens=9, ignore_eos=True)
    world.finish()
    world.fault(poisoned)
    generations = {plan.generation for plan in world.sent if len(plan.zero_pages)}
    assert len(generations) == 2
