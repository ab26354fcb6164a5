"""Samples of one request: their prompt is computed once and forked, by sharing its full pages and copying the last one.

Pages have four tokens. A prompt of ten tokens has two full pages and two tokens in a third page. Each sample computes
the last token itself.
"""

import pytest

from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import chunks, copies, first_positions, flush, load, starts
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=32)
TEN = list(range(10))


def ask(world: World, prompt: list[int] = TEN, **options: object) -> int:
    settings = {"max_new_tokens": 6, "num_samples": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return world.submit(prompt, **(settings | options))


def all_copies(world: World) -> list[tuple[int, int, int]]:
    return [copy for plan in world.sent for copy in copies(plan)]


def test_other_samples_wait_for_one_plan_then_copy_the_last_page(world: World) -> None:
    ask(world)
    world.tick()
    first, second = world.sent
    assert starts(world) == [(0, [1, 2, 3]), (9, [1, 2, 4]), (9, [1, 2, 5])]
    assert (chunks(first), copies(first)) == ([(1, 0, 10)], [])
    # Position 8 is copied and each sample computes position 9. The first sample has its first token and goes on.
    assert (chunks(second), copies(second)) == ([], [(3, 4, 1), (3, 5, 1)])
    assert second.decode_rows.tolist() == [1, 2, 3]
    assert [world.lane.pool.references(page) for page in range(1, 7)] == [3, 3, 1, 1, 1, 0]
    world.finish()
    assert [world.end(stream).stats.cached_prompt_tokens for stream in (1, 2, 3)] == [0, 9, 9]
    assert len({tuple(world.streams[stream].tokens) for stream in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    ("length", "first_position", "copied"),
    [(2, 1, 1), (3, 2, 2), (4, 3, 3), (5, 4, 0), (6, 5, 1), (8, 7, 3), (9, 8, 0), (12, 11, 3), (13, 12, 0)],
)
def test_a_fork_copies_the_last_page_up_to_the_last_token(length: int, first_position: int, copied: int) -> None:
    """If the prompt is one token longer than its full pages, these are shared and nothing is copied."""
    world = World(SHAPE)
    ask(world, list(range(length)), num_samples=2)
    world.finish()
    assert first_positions(world) == [0, first_position]
    assert [count for _, _, count in all_copies(world)] == [copied] * (copied > 0)


def test_samples_of_a_single_token_do_not_wait(world: World) -> None:
    ask(world, [7])
    world.tick()
    assert [len(plan.starts) for plan in world.sent] == [3, 0]
    world.finish()


def test_samples_wait_for_a_chunked_prompt_and_other_requests_pass_them() -> None:
    world = World(Shape(page_size=4, num_pages=32, token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.submit([50, 51, 52], max_new_tokens=2, ignore_eos=True)
    world.steps(3)
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 8)], [(1, 8, 2), (2, 0, 3)], []]
    assert [len(plan.starts) for plan in world.sent] == [1, 1, 1]
    assert first_positions(world) == [0, 0, 9]
    world.finish()


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_cancelled_sibling_leaves_its_full_pages_and_is_not_forked(is_computed: bool) -> None:
    """Two full pages were planned, or the whole prompt. The third page has no running sibling to copy from."""
    budget = {} if is_computed else {"token_budget": 8}
    world = World(Shape(page_size=4, num_pages=32, max_rows=4, **budget), greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.step() if is_computed else world.tick()
    world.cancel(1)
    world.settle()
    assert first_positions(world) == [0, 8]
    assert all_copies(world) == []


def test_a_sibling_that_ended_leaves_its_full_pages() -> None:
    world = World(Shape(page_size=4, num_pages=32, max_rows=1))
    ask(world)
    world.finish()
    assert first_positions(world) == [0, 8, 8]
    assert all_copies(world) == []


def test_a_cancelled_sibling_is_not_forked_although_it_computed_the_prompt() -> None:
    world = World(SHAPE, greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.step()
    world.cancel(1)
    world.settle()
    assert first_positions(world) == [0, 8]
    assert all_copies(world) == []


@pytest.mark.parametrize(("cancelled", "source"), [(2, 3), (1, 4)])
def test_any_running_sibling_is_forked_at_the_end_of_the_prompt(cancelled: int, source: int) -> None:
    """There are two rows. The third sample starts when another is cancelled, and copies only the prompt."""
    world = World(Shape(page_size=4, num_pages=32, max_rows=2), greedy(plans_in_flight=1))
    ask(world, max_new_tokens=9)
    world.steps(4)
    world.cancel(cancelled)
    world.step()
    assert starts(world)[-1] == (9, [1, 2, 6])
    assert copies(world.sent[-1]) == [(source, 6, 1)]
    world.settle()
    assert [len(world.streams[stream].tokens) for stream in (3 - cancelled, 3)] == [9, 9]


# With cache options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"cache_write": False}, {"salt": None}])
def test_forks_do_not_need_the_prefix_cache(world: World, options: dict[str, object]) -> None:
    ask(world, **options)
    world.finish()
    assert first_positions(world) == [0, 9, 9]
    assert load(world).pages_cached == 0


@pytest.mark.parametrize(("cache_read", "cached"), [(True, 8), (False, 0)])
def test_samples_are_forked_from_their_first_sample_whatever_that_found_in_the_cache(
    world: World, cache_read: bool, cached: int
) -> None:
    ask(world, num_samples=1)
    world.finish()
    ask(world, cache_read=cache_read)
    world.finish()
    assert first_positions(world) == [0, cached, 9, 9]
    assert [world.end(stream).stats.cached_prompt_tokens for stream in (2, 3, 4)] == [cached, 9, 9]


def test_forks_skip_the_prompt_logprobs_of_the_first_sample(world: World) -> None:
    ask(world, prompt_logprobs_from=2)
    world.finish()
    assert first_positions(world) == [0, 9, 9]
    assert [len(world.streams[stream].prompt_logprobs) for stream in (1, 2, 3)] == [8, 0, 0]


def test_a_flush_does_not_prevent_a_fork() -> None:
    world = World(Shape(page_size=4, num_pages=32, token_budget=8, max_rows=4), greedy(plans_in_flight=1))
    ask(world, num_samples=2)
    world.step()
    assert flush(world) == 2
    world.finish()
    assert first_positions(world) == [0, 9]


# With preemptions and failures ------------------------------------------------------------------------------------


def test_a_preempted_sample_with_output_resumes_without_a_fork() -> None:
    world = World(Shape(page_size=4, num_pages=7, max_rows=3), greedy(plans_in_flight=1))
    ask(world, num_samples=2, max_new_tokens=7)
    world.submit([60, 61], max_new_tokens=9, ignore_eos=True, priority=1)
    world.finish()
    assert world.core.counters.preemptions > 0
    resumed = [start for plan in world.sent for start in plan.starts if len(start.tokens) > start.num_prompt_tokens]
    assert resumed
    assert all(start.first_position % 4 == 0 for start in resumed)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_siblings_survive_a_failed_step(step: int) -> None:
    world = World(SHAPE, faults=Faults(fail_steps=frozenset({step})))
    ask(world)
    world.finish()
    assert world.core.counters.resets == 1
    assert [len(world.streams[stream].tokens) for stream in (1, 2, 3)] == [6, 6, 6]


def test_nonfinite_logits_end_all_samples_of_the_prompt() -> None:
    world = World(SHAPE, faults=Faults(nonfinite_token=280))
    ask(world, [*TEN[:8], 280, 9])
    world.submit(TEN, max_new_tokens=3, ignore_eos=True)
    world.settle()
    assert [world.end(stream).failure is None for stream in (1, 2, 3, 4)] == [False, False, False, True]
    # The last request shares the two pages before the bad token, and its own finite sample has verified them.
    assert world.end(4).stats.cached_prompt_tokens == 8
    assert load(world).pages_cached == 3
