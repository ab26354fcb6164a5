"""Plans stay within the worker's largest frame although many long rows could start at once."""

from dataclasses import replace

import pytest
from tandem.internal.v1 import worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.schedule.plan_builder import largest_plan_bytes
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=400, max_rows=40, max_length=300, token_budget=400)


def started_bytes(plan: Plan) -> int:
    """Returns the encoded size of the rows that a plan starts."""
    return worker_pb2.CoreToWorker.FromString(worker_wire.plan_frame(plan)).plan.started.ByteSize()


def test_rows_beyond_the_size_of_a_plan_start_with_the_next_plans() -> None:
    """Thirty long requests share the pages of their prompt, so all of them fit when a new worker joins."""
    limit = 6000
    world = World(SHAPE, config=greedy(max_plan_bytes=limit))
    streams = [world.submit([1] * 200, max_new_tokens=8, ignore_eos=True, seed=i) for i in range(30)]
    world.steps(7)
    world.kill()
    world.sent.clear()
    world.join()
    world.finish()
    assert all(len(world.streams[stream].tokens) == 8 for stream in streams)
    sizes = [started_bytes(plan) for plan in world.sent if len(plan.starts) > 1]
    assert sizes and max(sizes) <= limit
    assert max(len(plan.starts) for plan in world.sent) > 3


@pytest.mark.parametrize("num_listed", [0, 2000])
def test_the_estimate_of_a_plan_is_never_below_its_frame(num_listed: int) -> None:
    asked = {"biases": tuple((i, 1.0) for i in range(num_listed)), "allowed": frozenset(range(num_listed))}
    shape = replace(SHAPE, vocab_size=4000, sampled_vocab=273, token_budget=4000, num_pages=900)
    world = World(shape, config=greedy(max_plan_bytes=60_000))
    for i in range(12):
        world.submit([i] * 150, max_new_tokens=3, min_new_tokens=2, **asked)
    world.tick()
    plan = world.sent[0]
    size = started_bytes(plan)
    assert size <= 60_000
    # The estimate is not far above either, or the plan would start fewer rows than fit.
    one = size / len(plan.starts)
    assert size + one > 60_000 * 0.9 or len(plan.starts) == 12
    assert len(worker_wire.plan_frame(plan)) <= largest_plan_bytes(world.info(), 60_000)


def test_a_worker_whose_longest_row_exceeds_its_frames_is_refused(world: World) -> None:
    info = replace(world.info(), max_length=1 << 24, page_size=64, num_pages=4096)
    [note, refused] = world.handle(ev.WorkerJoined(worker="w-9", info=info))
    assert isinstance(note, fx.Note)
    assert isinstance(refused, fx.WorkerRefused)
    assert not refused.retry
    assert "max_length is 16777216" in refused.reason and "accepts frames of at most 67108864" in refused.reason


@pytest.mark.parametrize(("max_length", "num_pages"), [(131_072, 1 << 20), (1 << 20, 1 << 20), (8 << 20, 1 << 17)])
def test_workers_of_usual_sizes_fit_their_frames(max_length: int, num_pages: int) -> None:
    info = replace(World(SHAPE, join=False).info(), max_length=max_length, num_pages=num_pages, page_size=64)
    assert largest_plan_bytes(info, 16 << 20) <= 64 << 20


def test_plans_for_a_worker_with_small_frames_are_smaller() -> None:
    """40 rows of 20,000 tokens have 3.2 MB. The worker takes frames of 1 MiB, and started rows may fill half of one."""
    shape = Shape(page_size=64, num_pages=13_000, max_rows=40, max_length=21_000, token_budget=900_000)
    world, limit = World(shape, join=False), 1 << 20
    world.handle(ev.WorkerJoined(worker="w-1", info=replace(world.info(), max_frame_bytes=limit)))
    for i in range(40):
        world.submit([i] * 20_000, max_new_tokens=2, salt=None)
    world.tick()
    assert len(world.sent) == 2
    for plan in world.sent:
        assert len(plan.starts) > 1 and started_bytes(plan) <= limit // 2
        assert len(worker_wire.plan_frame(plan)) <= limit
