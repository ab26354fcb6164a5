"""Steps that run out of memory: any worker serves a request that fits alone, after few failures and without a loop."""

import math
import random
from itertools import pairwise

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.state.memory_limit import FIRST_RECOVERY_STEPS, Reduction
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(num_pages=160, max_rows=32, token_budget=128, chunk_align=8, max_length=64, page_size=8)


def world_with(*, shape: Shape = SHAPE, **faults: int) -> World:
    return World(shape, greedy(), faults=Faults(**faults))


def reductions(world: World) -> dict[Reduction, int]:
    return world.core.counters.memory_reductions


def bound(world: World, shape: Shape = SHAPE) -> float:
    """Failures to find both limits once, times the rounds in which they are raised and found again."""
    once = math.log2(shape.token_budget / shape.chunk_align) + math.log2(shape.max_rows) + 2
    rounds = 1 + math.log2(max(1.0, world.core.counters.steps / FIRST_RECOVERY_STEPS))
    return once * rounds


@pytest.mark.parametrize("seed", range(10))
def test_a_worker_of_any_memory_serves_everything_after_few_resets(seed: int) -> None:
    rng = random.Random(seed)
    world = world_with(memory_tokens=rng.randint(8, 128), memory_rows=rng.randint(1, 32))
    world.audit_every = 8
    for _ in range(60):
        prompt = [rng.randrange(5) for _ in range(rng.choice([1, 5, 20, 50]))]
        world.submit(prompt, max_new_tokens=rng.randint(1, 13), ignore_eos=True)
        if rng.random() < 0.2:
            world.step(0.001)
    world.finish()
    assert all(stream.end and stream.end.reason is fx.EndReason.LENGTH for stream in world.streams.values())
    assert not reductions(world)[Reduction.ENDED] and not reductions(world)[Reduction.REFUSED]
    assert world.core.counters.resets == sum(reductions(world).values()) <= bound(world)
    assert world.core.suspects.handles == set()


def limits_until_recovery(world: World) -> list[tuple[int, int]]:
    """The token budgets and numbers of rows that the lane had until its limits are raised."""
    seen: list[tuple[int, int]] = []
    for _ in range(200):
        if world.core.counters.steps == FIRST_RECOVERY_STEPS - 1:
            return seen
        world.step(0.001)
        limits = world.lane.memory.token_budget, world.lane.memory.max_rows
        seen += [limits] if not seen or limits != seen[-1] else []
    raise AssertionError(f"too few confirmed steps: {world.core.counters.steps}; {seen}")


def test_the_token_budget_halves_while_chunks_are_in_the_step() -> None:
    world = world_with(memory_tokens=24)
    for _ in range(32):
        world.submit([1] * 20, max_new_tokens=40, ignore_eos=True, salt=None)
    budgets, rows = zip(*limits_until_recovery(world), strict=True)
    assert set(rows) == {32} and all(2 * after <= before for before, after in pairwise((128, *budgets))), budgets
    assert budgets[-1] <= 24


def test_rows_halve_in_steps_that_only_decode() -> None:
    world = world_with(memory_rows=6)
    for _ in range(32):
        world.submit([1], max_new_tokens=40, ignore_eos=True)
    assert limits_until_recovery(world) == [(128, 16), (128, 8), (128, 4)]


def test_limits_recover_after_confirmed_steps() -> None:
    world = world_with()
    memory = world.lane.memory
    world.executor._faults = Faults(memory_tokens=20)
    for _ in range(10):
        world.submit([1] * 40, max_new_tokens=2, ignore_eos=True, salt=None)
    world.run()
    assert memory.token_budget < 40
    world.executor._faults = Faults()
    for _ in range(10):
        world.submit([1] * 4, max_new_tokens=60, ignore_eos=True, salt=None)
        world.run()
    assert (memory.token_budget, memory.max_rows) == (128, 32)
    world.check_all_ended()


def test_a_request_that_cannot_run_alone_ends_with_the_numbers_and_the_others_are_served() -> None:
    world = world_with(oom_token=7)
    others = [world.submit([1, 2, number], max_new_tokens=8, ignore_eos=True) for number in range(20, 50)]
    culprit = world.submit([1, 2, 7, 3], max_new_tokens=8, request_id="culprit")
    world.finish()
    failure = world.fault(culprit)
    assert "request culprit" in failure and "4 positions of 1 row" in failure
    assert all(world.end(stream).reason is fx.EndReason.LENGTH for stream in others)
    counts = reductions(world)
    assert (counts[Reduction.ALONE], counts[Reduction.ENDED], counts[Reduction.REFUSED]) == (1, 1, 0)
    assert world.core.counters.resets <= bound(world)


def test_a_worker_on_which_nothing_runs_is_refused_instead_of_ending_every_request() -> None:
    world = world_with(memory_tokens=0)
    for number in range(20):
        world.submit([1, 2, number], max_new_tokens=8, ignore_eos=True)
    for _ in range(100):
        world.step(0.001)
        if world.is_lost:
            break
    refused = world.told(fx.WorkerRefused)
    assert [effect.retry for effect in refused] == [True] and "ran out of memory alone" in refused[0].reason
    assert reductions(world)[Reduction.ENDED] == 1
    world.join()
    world.finish()
    assert sum(stream.end is not None and stream.end.failure is None for stream in world.streams.values()) == 19


def test_a_prompt_waits_while_more_rows_decode_than_the_token_budget_has_tokens() -> None:
    world = world_with(shape=Shape(num_pages=160, max_rows=8, token_budget=8, chunk_align=1, max_length=64))
    decoding = [world.submit([1], max_new_tokens=12, ignore_eos=True) for _ in range(3)]
    prompt = world.submit([1] * 12, max_new_tokens=2, ignore_eos=True)
    world.step(0.001)
    world.lane.memory.token_budget = 1
    for _ in range(5):
        world.step(0.001)
        assert not world.streams[prompt].tokens
    world.finish()
    assert all(world.end(stream).reason is fx.EndReason.LENGTH for stream in [*decoding, prompt])
