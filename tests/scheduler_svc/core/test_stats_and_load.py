"""The stats of ended requests, the load, what front ends are sent, and the size of the queue's heaps."""

from dataclasses import replace
from typing import Any

import pytest
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS
from scheduler_svc.core.messages.effects import MAX_COUNT
from scheduler_svc.core.messages.reports import WaitReason
from scheduler_svc.frontend.streaming.sender import summarize
from scheduler_svc.wire.frontend import frame_of
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

# Stats and load -----------------------------------------------------------------------------------------------


def test_tokens_in_flight_after_nonfinite_logits_count_as_discarded() -> None:
    world = World(config=greedy(plans_in_flight=3), faults=Faults(nonfinite_token=280))
    stream = world.submit([1, 280], max_new_tokens=9)
    world.step()
    stats = world.end(stream).stats
    # Three tokens were planned. The first result is not finite, so the other two tokens are discarded.
    assert (stats.output_tokens, stats.discarded_tokens, stats.recomputed_tokens) == (0, 2, 0)


def test_only_recomputed_positions_count_as_recomputed() -> None:
    """The worker is lost after 24 positions, and the next one after it has recomputed 8 of them."""
    world = World(Shape(token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    stream = world.submit(list(range(40)), max_new_tokens=1, ignore_eos=True)
    for steps in (3, 1):
        world.steps(steps)
        world.restart()
    world.run()
    assert world.end(stream).stats.recomputed_tokens == 8 + 24


def test_counts_stay_at_what_an_answer_can_hold() -> None:
    world = World(Shape(token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    stream = world.submit(list(range(40)), max_new_tokens=1, ignore_eos=True)
    world.steps(3)
    [request] = world.core.queue
    request.recomputed_tokens = request.preemptions = request.worker_changes = MAX_COUNT
    world.restart()
    world.run()
    end = world.end(stream)
    assert (end.stats.recomputed_tokens, end.stats.preemptions, end.stats.worker_changes) == (MAX_COUNT,) * 3
    resumed = fx.Resumed(frontend=FRONTEND, request_id="r", stream=1, description=b"", outputs=(NO_IDS,), ends=(end,))
    [sample] = frontend_pb2.CoreToFrontend.FromString(frame_of(resumed)).resumed.samples
    assert sample.end.usage.recomputed_tokens == sample.end.timing.worker_changes == MAX_COUNT
    summary = summarize([sample.end, sample.end], [1, 1], prompt_tokens=40)
    assert (summary.usage.recomputed_tokens, summary.timing.preemptions) == (MAX_COUNT, MAX_COUNT)


@pytest.mark.parametrize(("output_tokens", "counted"), [(0, 0), (2, 2), (3, 3), (100, 3)])
def test_a_finish_counts_at_most_the_delivered_tokens(output_tokens: int, counted: int) -> None:
    world = World(config=greedy(plans_in_flight=2))
    stream = world.submit([1, 2], max_new_tokens=50, ignore_eos=True)
    world.steps(3)
    assert len(world.streams[stream].tokens) == 3
    world.handle(ev.Finish(frontend=FRONTEND, stream=stream, output_tokens=output_tokens))
    stats = world.end(stream).stats
    # One token is in flight and counts as discarded.
    assert (stats.output_tokens, stats.discarded_tokens) == (counted, 3 - counted + 1)


# Front ends ---------------------------------------------------------------------------------------------------


def status_of(frontend: str, **fields: Any) -> fx.CoreStatus:
    serving = fx.CoreStatus(
        frontend=frontend,
        queue_full="",
        not_serving="",
        reason=None,
        not_serving_seconds=0.0,
        refuses=False,
        workers=1,
        retry_seconds=0.0,
    )
    return replace(serving, **fields)


def greeting(world: World, frontend: str = FRONTEND) -> list[fx.Effect]:
    """Returns the effects for a front end that joins: the model, and the core's status as of its last plan."""
    info = world.info()
    return [
        fx.ModelServed(frontend=frontend, info=info, recent_max_length=info.max_length),
        status_of(frontend),
    ]


def test_a_front_end_that_joins_again_loses_its_requests(world: World) -> None:
    world.submit([1, 2], max_new_tokens=50, ignore_eos=True)
    world.step()
    world.submit([3, 4])
    effects = world.handle(ev.FrontendJoined(frontend=FRONTEND))
    assert effects == greeting(world)
    world.check_empty()
    world.streams.clear()
    again = world.submit([1, 2], ignore_eos=True)
    world.finish()
    assert len(world.streams[again].tokens) == 4


def test_front_ends_get_the_model_when_a_worker_joins() -> None:
    world = World(join=False)
    assert world.effects == [
        fx.ModelServed(frontend=FRONTEND, info=None, recent_max_length=0),
        status_of(FRONTEND, reason=WaitReason.NO_WORKER, not_serving="no worker has joined yet", workers=0),
    ]
    world.handle(ev.FrontendJoined(frontend="f-2"))
    world.effects.clear()
    world.join()
    served = world.told(fx.ModelServed)
    assert served == [greeting(world, name)[0] for name in (FRONTEND, "f-2")]
    world.kill()
    world.effects.clear()
    world.join()
    assert not world.told(fx.ModelServed)


def test_a_drain_is_announced_to_present_and_later_front_ends(world: World) -> None:
    world.tick()
    assert world.handle(ev.DrainStarted()) == [fx.AnnounceDrain(frontend=FRONTEND)]
    drained = {"reason": WaitReason.SHUTTING_DOWN, "not_serving": "the service is shutting down", "refuses": True}
    assert world.handle(ev.Tick()) == [status_of(FRONTEND, **drained)]
    assert world.handle(ev.FrontendJoined(frontend="f-2")) == [
        greeting(world, "f-2")[0],
        status_of("f-2", **drained),
        fx.AnnounceDrain(frontend="f-2"),
    ]


# Bounds -------------------------------------------------------------------------------------------------------


def test_entries_of_cancelled_requests_do_not_accumulate(world: World) -> None:
    # This request is the first and no worker plans, so deadlines of ended requests are never popped.
    first = world.submit([1], priority=9, deadline_seconds=1e5)
    world.kill()
    core, submit = world.core, world.streams[first].submit
    longest_queue = most_deadlines = 0
    for stream in range(10, 10_010):
        core.handle(replace(submit, stream=stream, request_id=f"r{stream}", priority=0, deadline_seconds=1e6), 0.0)
        core.handle(ev.Cancel(frontend=FRONTEND, stream=stream), 0.0)
        core.handle(ev.Tick(), 0.0)
        longest_queue = max(longest_queue, len(core.queue.tenants[""].waiting))
        most_deadlines = max(most_deadlines, len(core.queue._deadlines._heap))
    assert core.queue.num_waiting == 1
    assert longest_queue == 1
    # At most twice the live requests, and 64 that are not worth a cleanup.
    assert most_deadlines <= 2 * 2 + 64
    world.join()
    world.finish()
