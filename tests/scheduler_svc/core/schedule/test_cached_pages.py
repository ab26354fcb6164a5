"""How long pages stay cached: after any end of their request, until they are allocated, flushed or void."""

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import first_positions, flush, load, starts
from tests.scheduler_svc.core.world import FRONTEND, World, greedy, text

SHAPE = Shape(page_size=4, num_pages=32)


def ask(world: World, prompt: list[int], **options: object) -> int:
    return world.submit(prompt, **({"max_new_tokens": 1, "ignore_eos": True} | options))


def found(world: World, prompt: list[int]) -> int:
    """Runs the prompt and returns how many of its tokens were cached. This also makes them recently used."""
    stream = ask(world, prompt)
    world.settle()
    return world.end(stream).stats.cached_prompt_tokens


# After the end of their request -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "abort", "finish", "front end", "time limit"])
@pytest.mark.parametrize("confirmed", [False, True])
def test_pages_stay_cached_after_an_end_from_outside(how: str, confirmed: bool) -> None:
    world = World(SHAPE, greedy(plans_in_flight=1))
    stream = ask(world, text(9), max_new_tokens=20, max_time_seconds=2.0)
    world.tick()
    if confirmed:
        world.work()
    match how:
        case "cancel":
            world.cancel(stream)
        case "abort":
            world.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=("r1",)))
        case "finish":
            world.handle(ev.Finish(frontend=FRONTEND, stream=stream, output_tokens=0))
        case "front end":
            world.handle(ev.FrontendJoined(frontend=FRONTEND))
        case _:
            world.tick(2.0)
    assert load(world).pages_used == 0
    # If no step is confirmed, the plan that fills the pages is still in flight, and the next plan comes after it.
    assert found(world, text(9)) == 8


# Until they are allocated -----------------------------------------------------------------------------------------


def test_the_end_of_a_sequence_is_evicted_before_its_start() -> None:
    world = World(Shape(page_size=4, num_pages=6))
    assert found(world, text(9)) == 0
    # Page 3 is not full and so not cached; pages 4 and 5 were never used. The cached pages follow, last page first.
    assert world.lane.pool.free_pages() == [3, 4, 5, 2, 1]
    found(world, text(13, 100))
    assert starts(world)[1] == (0, [3, 4, 5, 2])
    assert found(world, text(9)) == 4


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    world = World(Shape(page_size=4, num_pages=5))
    first, second = text(5), text(5, 50)
    found(world, first)
    found(world, second)
    # The first sequence is used again, so the second one is the least recently used.
    assert found(world, first) == 4
    found(world, text(9, 100))
    assert found(world, first) == 4
    assert found(world, second) == 0


def test_used_pages_are_not_allocated() -> None:
    world = World(Shape(page_size=4, num_pages=5, max_rows=2), greedy(plans_in_flight=1))
    ask(world, text(5), max_new_tokens=4)
    for first in (50, 70):
        ask(world, text(8, first))
        world.step()
    ask(world, text(5))
    world.step()
    # The first request still runs. The two other pages are allocated in turn, the last page of a sequence first.
    assert starts(world) == [(0, [1, 2]), (0, [3, 4]), (0, [4, 3]), (4, [1, 3])]
    world.finish()


def test_a_released_page_is_matched_again_at_once() -> None:
    world = World(Shape(page_size=4, num_pages=4, max_rows=1), greedy(plans_in_flight=3))
    cancelled = ask(world, text(9), max_new_tokens=2)
    world.tick()
    assert len(world.sent) == 2
    world.cancel(cancelled)
    again = ask(world, text(9), max_new_tokens=2)
    world.tick()
    # Plans in flight still read and write the pages. This plan comes after them.
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 3])]
    world.settle()
    assert world.end(again).stats.cached_prompt_tokens == 8


# Resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_new_tokens", "cache_write", "recomputed"),
    [
        (5, True, 0),  # the first request stays within three pages
        (9, True, 4),  # it takes a fourth page, the last one that the preempted request left
        (5, False, 8),  # no page of the preempted request is cached
    ],
)
def test_a_preempted_request_resumes_from_its_remaining_cached_pages(
    max_new_tokens: int, cache_write: bool, recomputed: int
) -> None:
    world = World(Shape(page_size=4, num_pages=6), greedy(plans_in_flight=1))
    first = ask(world, text(7), max_new_tokens=max_new_tokens)
    victim = ask(world, text(7, 50), max_new_tokens=9, cache_write=cache_write)
    world.steps(3)
    # Eight of its positions were confirmed: two pages.
    [waiting] = world.core.queue.by_request_id("r2")
    assert (waiting.row, waiting.computed, waiting.preemptions) == (0, 8, 1)
    world.finish()
    assert world.end(victim).stats.recomputed_tokens == recomputed
    assert world.end(victim).stats.preemptions == 1
    assert world.end(first).stats.preemptions == 0
    assert first_positions(world) == [0, 0, 8 - recomputed]
    # Its own pages do not count as cached prompt tokens.
    assert load(world).cached_prompt_tokens == 0


# Until they are void ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "cached"),
    [
        (pb.STEP_STATUS_FAILED, [1, 2]),
        (pb.STEP_STATUS_OUT_OF_MEMORY, [1, 2]),
        (pb.STEP_STATUS_OUT_OF_SYNC, []),
        (pb.STEP_STATUS_SKIPPED, []),
    ],
)
def test_pages_of_confirmed_steps_survive_a_failed_step(status: int, cached: list[int]) -> None:
    """After other failures the core cannot know what the worker's pages hold."""
    world = World(Shape(page_size=4, num_pages=32, token_budget=8), greedy(plans_in_flight=1))
    ask(world, text(17), max_new_tokens=4)
    world.step()
    world.tick()
    assert starts(world) == [(0, [1, 2, 3, 4, 5])]
    assert cached_pages(world) == [1, 2, 3, 4]
    world.apply()
    world.results[0].status = status
    world.deliver()
    assert cached_pages(world) == cached


def cached_pages(world: World) -> list[int]:
    """Returns the pages in the prefix cache index."""
    return [page for page in range(1, world.shape.num_pages) if world.lane.pool.hash_of(page)]


def test_pages_of_plans_after_the_failed_one_are_evicted() -> None:
    world = World(
        Shape(page_size=4, num_pages=32, token_budget=8),
        greedy(plans_in_flight=3),
        faults=Faults(fail_steps=frozenset({2})),
    )
    ask(world, text(25), max_new_tokens=4)
    world.tick()
    assert cached_pages(world) == [1, 2, 3, 4, 5, 6]
    for _ in range(3):
        world.work()
    world.deliver()
    assert cached_pages(world) == [1, 2]
    # The suspect recomputes everything, and the request after it finds its pages.
    world.run()
    assert first_positions(world) == [0, 0]
    assert found(world, text(25)) == 24
    world.check_all_ended()


# Until they are flushed -------------------------------------------------------------------------------------------


def test_a_flush_evicts_everything_and_rows_run_on(world: World) -> None:
    found(world, text(9))
    stream = ask(world, text(9, 50), max_new_tokens=12)
    world.step()
    assert (load(world).pages_cached, load(world).pages_used) == (2, 3)
    # Two unused pages, and two full pages of the running request.
    assert flush(world) == 4
    assert (load(world).pages_cached, load(world).pages_used) == (0, 3)
    assert flush(world) == 0
    assert found(world, text(9)) == 0
    ask(world, text(9, 50))
    world.finish()
    assert first_positions(world) == [0, 0, 0, 0]
    assert len(world.streams[stream].tokens) == 12


def test_a_flush_without_a_worker_evicts_nothing() -> None:
    world = World(SHAPE, join=False)
    assert flush(world) == 0
