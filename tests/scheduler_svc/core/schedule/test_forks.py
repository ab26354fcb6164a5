"""Samples of one request: their prompt is computed once, and forked by copying what stands in its last page.

Pages have four tokens. The prompt of ten: two full pages, and two tokens in a third, the last of which each sample
computes itself.
"""

import pytest

from scheduler_svc.core.state.lane import Lane
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.orders import beginnings, chunks, copies, flush, load, starts
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=32)
TEN = list(range(10))


def ask(world: World, prompt: list[int] = TEN, **wish: object) -> int:
    settings = {"max_new_tokens": 6, "num_samples": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return world.submit(prompt, **(settings | wish))


def lane(world: World) -> Lane:
    assert world.lane is not None
    return world.lane


def all_copies(world: World) -> list[tuple[int, int, int]]:
    return [copy for plan in world.sent for copy in copies(plan)]


def finish(world: World) -> None:
    world.run()
    world.check_all_ended()


def test_the_others_wait_for_one_plan_then_copy_the_last_page() -> None:
    world = World(SHAPE)
    ask(world)
    world.tick()
    first, second = world.sent
    assert starts(world) == [(0, [1, 2, 3]), (9, [1, 2, 4]), (9, [1, 2, 5])]
    assert (chunks(first), copies(first)) == ([(1, 0, 10)], [])
    # Position 8 is copied, position 9 computed by each; the first sample has sampled and goes on.
    assert (chunks(second), copies(second)) == ([], [(3, 4, 1), (3, 5, 1)])
    assert second.decode_rows.tolist() == [1, 2, 3]
    assert [lane(world).pool.references(page) for page in range(1, 7)] == [3, 3, 1, 1, 1, 0]
    finish(world)
    assert [world.end(stream).stats.cached_prompt_tokens for stream in (1, 2, 3)] == [0, 9, 9]
    assert len({tuple(world.streams[stream].tokens) for stream in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    ("length", "first_position", "copied"),
    [(2, 1, 1), (3, 2, 2), (4, 3, 3), (5, 4, 0), (6, 5, 1), (8, 7, 3), (9, 8, 0), (12, 11, 3), (13, 12, 0)],
)
def test_what_stands_before_the_last_token_is_copied(length: int, first_position: int, copied: int) -> None:
    """Of a prompt one longer than its full pages nothing is left to copy: these are shared."""
    world = World(SHAPE)
    ask(world, list(range(length)), num_samples=2)
    finish(world)
    assert beginnings(world) == [0, first_position]
    assert [count for _, _, count in all_copies(world)] == [copied] * (copied > 0)


def test_samples_of_a_single_token_need_not_wait() -> None:
    world = World(SHAPE)
    ask(world, [7])
    world.tick()
    assert [len(plan.starts) for plan in world.sent] == [3, 0]
    finish(world)


def test_they_wait_while_the_prompt_runs_in_chunks_and_others_pass_by() -> None:
    world = World(Shape(page_size=4, num_pages=32, token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.submit([50, 51, 52], max_new_tokens=2, ignore_eos=True)
    for _ in range(3):
        world.step()
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 8)], [(1, 8, 2), (2, 0, 3)], []]
    assert [len(plan.starts) for plan in world.sent] == [1, 1, 1]
    assert beginnings(world) == [0, 0, 9]
    finish(world)


def test_a_sibling_that_goes_while_it_computes_leaves_what_it_planned() -> None:
    world = World(Shape(page_size=4, num_pages=32, token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.tick()
    world.cancel(1)
    world.run()
    world.check_content()
    # Two full pages were planned; nothing of the third is copied from nobody.
    assert beginnings(world) == [0, 8]
    assert all_copies(world) == []


def test_a_sibling_that_ended_leaves_its_full_pages() -> None:
    world = World(Shape(page_size=4, num_pages=32, max_rows=1))
    ask(world)
    finish(world)
    assert beginnings(world) == [0, 8, 8]
    assert all_copies(world) == []


def test_a_sibling_that_left_is_no_source_even_where_all_of_it_stands() -> None:
    world = World(SHAPE, greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.step()
    world.cancel(1)
    world.run()
    world.check_content()
    assert beginnings(world) == [0, 8]
    assert all_copies(world) == []


@pytest.mark.parametrize(("gone", "source"), [(2, 3), (1, 4)])
def test_any_sibling_that_runs_is_a_source_however_far_it_has_gone(gone: int, source: int) -> None:
    """Room for two rows: the third sample comes when another goes, and copies no more than the prompt."""
    world = World(Shape(page_size=4, num_pages=32, max_rows=2), greedy(plans_in_flight=1))
    ask(world, max_new_tokens=9)
    for _ in range(4):
        world.step()
    world.cancel(gone)
    world.step()
    assert starts(world)[-1] == (9, [1, 2, 6])
    assert copies(world.sent[-1]) == [(source, 6, 1)]
    world.run()
    world.check_content()
    assert [len(world.streams[stream].tokens) for stream in (3 - gone, 3)] == [9, 9]


# With the caller's wishes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [{"cache_write": False}, {"salt": None}])
def test_forks_need_no_index(wish: dict[str, object]) -> None:
    world = World(SHAPE)
    ask(world, **wish)
    finish(world)
    assert beginnings(world) == [0, 9, 9]
    assert load(world).pages_cached == 0


def test_who_bypasses_reading_forks_its_own_prompt_all_the_same() -> None:
    world = World(SHAPE)
    ask(world, num_samples=1)
    finish(world)
    ask(world, cache_read=False)
    finish(world)
    assert beginnings(world) == [0, 0, 9, 9]


def test_a_fork_goes_on_from_a_hit() -> None:
    world = World(SHAPE)
    ask(world, num_samples=1)
    finish(world)
    ask(world)
    finish(world)
    assert beginnings(world) == [0, 8, 9, 9]
    assert [world.end(stream).stats.cached_prompt_tokens for stream in (2, 3, 4)] == [8, 9, 9]


def test_prompt_logprobs_are_the_first_ones_and_forks_do_not_wait_for_more() -> None:
    world = World(SHAPE)
    ask(world, prompt_logprobs_from=2)
    finish(world)
    assert beginnings(world) == [0, 9, 9]
    assert [len(world.streams[stream].prompt_logprobs) for stream in (1, 2, 3)] == [8, 0, 0]


def test_a_flush_does_not_part_siblings() -> None:
    world = World(Shape(page_size=4, num_pages=32, token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.step()
    assert flush(world) == 2
    finish(world)
    assert beginnings(world) == [0, 9]


# When things go wrong ---------------------------------------------------------------------------------------------


def test_who_was_preempted_goes_on_from_its_own_answer_and_forks_no_more() -> None:
    world = World(Shape(page_size=4, num_pages=7, max_rows=3), greedy(plans_in_flight=1))
    ask(world, num_samples=2, max_new_tokens=7)
    world.submit([60, 61], max_new_tokens=9, ignore_eos=True, priority=1)
    finish(world)
    assert world.core.counters.preemptions > 0
    resumed = [start for plan in world.sent for start in plan.starts if len(start.tokens) > start.num_prompt_tokens]
    assert resumed
    assert all(start.first_position % 4 == 0 for start in resumed)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_siblings_survive_a_step_that_fails(step: int) -> None:
    world = World(SHAPE, join=False)
    world.join(Faults(fail_steps=frozenset({step})))
    ask(world)
    finish(world)
    assert world.core.counters.resets == 1
    assert [len(world.streams[stream].tokens) for stream in (1, 2, 3)] == [6, 6, 6]


def test_a_prompt_that_is_not_finite_ends_all_that_share_it() -> None:
    world = World(SHAPE, join=False)
    world.join(Faults(nonfinite_token=280))
    ask(world, [*TEN[:8], 280, 9])
    world.submit(TEN, max_new_tokens=3, ignore_eos=True)
    world.run()
    world.check_content()
    world.check_empty()
    assert [world.end(stream).failure is None for stream in (1, 2, 3, 4)] == [False, False, False, True]
    # The last one has the pages before it, which its own finite sample has read.
    assert world.end(4).stats.cached_prompt_tokens == 8
    assert load(world).pages_cached == 3
