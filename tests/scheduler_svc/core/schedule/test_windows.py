"""Sliding windows: a row releases a page as soon as no position reads it again, and allocates pages chunk by chunk.

Pages have four tokens. The window is six unless the test sets another: position p reads p - 5 to p, and the sinks.
"""

import pytest

from scheduler_svc.core.scheduler import CoreConfig
from scheduler_svc.core.state.lane_schedule import SHARE_RAISE
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import chunks, first_positions, starts
from tests.scheduler_svc.core.world import World, greedy, text


def shape(num_pages: int = 32, **settings: int) -> Shape:
    return Shape(**({"page_size": 4, "num_pages": num_pages, "window": 6, "max_length": 256} | settings))


def held(world: World, row: int = 1) -> list[int]:
    """Returns the logical indices of the pages that the row holds."""
    pages = world.lane.rows.pages[row]
    held_from = int(world.lane.rows.held_from[row])
    indices = [i for i in range(len(pages)) if i >= held_from or i < world.lane.sink_pages]
    assert [pages[i] for i in indices] == world.lane.held_pages(row)
    return indices


# Releasing pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("sinks", [0, 1, 4, 5])
def test_a_row_holds_only_the_pages_that_its_next_position_reads(window: int, sinks: int) -> None:
    world = World(shape(window=window, sink_tokens=sinks), greedy(plans_in_flight=1))
    world.submit(text(7), max_new_tokens=20, ignore_eos=True)
    for _ in range(19):
        world.tick()
        planned = int(world.lane.rows.planned[1])
        seen = {*range(planned - (window or planned) + 1, planned), *range(sinks)}
        pages = {position // 4 for position in seen if 0 <= position < planned}
        # A sink page is held in full, although it may hold more than the sinks. So is the page that is being filled.
        if planned % 4:
            pages.add(planned // 4)
        assert held(world) == sorted(pages)
        world.work()
    world.finish()


def test_a_page_before_the_window_is_released_and_can_be_allocated_again() -> None:
    world = World(shape(num_pages=4), greedy(plans_in_flight=3))
    world.submit(text(7), max_new_tokens=12, ignore_eos=True)
    world.finish()
    given = [
        (int(lane_row), int(page))
        for plan in world.sent
        for lane_row, page in zip(plan.append_rows, plan.append_pages, strict=True)
    ]
    # Seven tokens, then one per plan: positions 8, 12 and 16 need a page, at plans 3, 7 and 11. Page 1 is behind the
    # window from position 9 on and page 2 from 13 on, so three pages are enough.
    assert starts(world) == [(0, [1, 2])]
    assert [plan.step for plan in world.sent if len(plan.append_rows)] == [3, 7, 11]
    assert given == [(1, 3), (1, 1), (1, 2)]


def test_a_request_does_not_verify_a_page_that_it_released() -> None:
    """There is one page and a window of one token, so the page is unused once the first request's plan is made. The
    next request writes values that are not finite to it before the first one ends."""
    world = World(shape(num_pages=2, window=1), greedy(plans_in_flight=2), faults=Faults(nonfinite_token=280))
    world.submit(text(4), max_new_tokens=1, ignore_eos=True)
    world.submit([1, 280], max_new_tokens=3, ignore_eos=True)
    next_request = world.submit([2, 2], max_new_tokens=3, ignore_eos=True)
    world.settle()
    assert starts(world) == [(0, [1])] * 3
    assert [plan.zero_pages.tolist() for plan in world.sent if plan.starts] == [[], [1], [1]]
    assert len(world.streams[next_request].tokens) == 3


def test_a_row_that_leaves_does_not_verify_a_page_that_it_released() -> None:
    """Pages and window have one token, so the first row's page is unused once its plan is made. The second row gets the
    page and writes values that are not finite, and the first row ends in between. The third row must zero the page."""
    world = World(
        shape(num_pages=6, page_size=1, window=1, max_rows=3),
        greedy(plans_in_flight=2),
        faults=Faults(nonfinite_token=280),
    )
    for prompt in ([7], [280]):
        world.submit(prompt, max_new_tokens=1, ignore_eos=True, salt=None)
        world.tick()
    while world.apply() or world.deliver():
        pass
    next_request = world.submit([2], max_new_tokens=1, ignore_eos=True, salt=None)
    world.settle()
    assert starts(world) == [(0, [1])] * 3
    assert [plan.zero_pages.tolist() for plan in world.sent] == [[], [1], [1]]
    assert len(world.streams[next_request].tokens) == 1


# Sequences longer than the pool -----------------------------------------------------------------------------------


def test_a_sequence_longer_than_the_pool_completes() -> None:
    """Five pages for fifty prompt tokens and six output tokens: chunks are cut to the unused pages."""
    world = World(shape(num_pages=6), greedy(plans_in_flight=1))
    stream = world.submit(text(50), max_new_tokens=6, ignore_eos=True)
    world.finish()
    # After twenty positions the next one reads from 15 on: pages 3 and 4 of five are used, three are unused.
    assert [chunk for plan in world.sent for chunk in chunks(plan)] == [
        (1, 0, 20), (1, 20, 12), (1, 32, 12), (1, 44, 6)
    ]  # fmt: skip
    assert len(world.streams[stream].tokens) == 6


def test_a_first_chunk_leaves_the_headroom_of_the_running_rows() -> None:
    """Ten pages, and a row holds three. A chunk that used all unused pages would leave no headroom and not fit."""
    world = World(shape(num_pages=11, max_rows=4), CoreConfig(plans_in_flight=1))
    for first in (0, 100):
        world.submit(text(40, first), max_new_tokens=40, ignore_eos=True)
    world.steps(8)
    assert world.core.counters.preemptions == 0
    assert world.lane.rows.num_seated == 2
    world.finish()


def test_a_request_too_large_for_its_window_is_rejected_with_the_numbers() -> None:
    world = World(shape(num_pages=4, sink_tokens=1))
    # The sink page, and three pages that a window of six covers while it moves.
    rejected = world.refusal(world.submit(text(13), max_new_tokens=5))
    assert rejected.message == ("prompt (13 tokens) and max_new_tokens (5) take 4 pages of 4 tokens; the pool has 3")
    fits = world.submit(text(8), max_new_tokens=5, ignore_eos=True)
    world.run()
    assert len(world.streams[fits].tokens) == 5


def test_prompts_that_starve_each_other_are_resolved_in_the_same_tick() -> None:
    """Four pages. The first prompt computes four logprobs a step, the second one starts beside it, and both need a
    further page. Rows are expected to grow more after a preemption."""
    world = World(shape(num_pages=5, max_rows=2, spare_logit_rows=4), greedy(plans_in_flight=1))
    world.submit(text(20), max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=1)
    world.submit(text(20, 100), max_new_tokens=3, ignore_eos=True)
    world.steps(2)
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 4), (2, 0, 12)], [(1, 4, 4)]]
    assert [held(world, row) for row in (1, 2)] == [[0, 1], [1, 2]]
    share = world.lane.schedule.expected_share
    world.tick()
    # The newer request is preempted, and the older one continues in the plan of the same tick.
    assert chunks(world.sent[2]) == [(1, 8, 4)]
    assert world.core.counters.preemptions == 1
    assert world.lane.schedule.expected_share == share + SHARE_RAISE
    world.finish()
    assert [world.end(stream).stats.preemptions for stream in (1, 2)] == [0, 1]


# Prefix matches and forks -----------------------------------------------------------------------------------------


def test_a_prefix_match_needs_only_the_pages_in_the_window() -> None:
    world = World(shape(), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=1, ignore_eos=True)
    world.run()
    world.submit([*text(21), 200], max_new_tokens=1, ignore_eos=True)
    world.finish()
    # Position 20 reads from 15 on, so indices 3 and 4. The page list has 0 for the indices before.
    assert starts(world) == [(0, [1, 2, 3, 4, 5, 6]), (20, [0, 0, 0, 4, 5, 6])]


def test_a_prefix_match_needs_the_sink_pages() -> None:
    world = World(shape(sink_tokens=3), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=1, ignore_eos=True)
    world.run()
    world.submit([*text(21), 200], max_new_tokens=1, ignore_eos=True)
    world.finish()
    assert starts(world)[1] == (20, [1, 0, 0, 4, 5, 6])
    world.lane.pool.evict(1)
    world.submit([*text(21), 201], max_new_tokens=1, ignore_eos=True)
    world.run()
    assert first_positions(world)[2] == 0


@pytest.mark.parametrize(
    ("evicted", "matched"),
    [
        ([1, 2, 3], 20),  # behind the window
        ([5], 16),  # position 16 reads from 11 on, so indices 2 and 3
        ([4], 12),
        ([4, 1], 12),
        ([4, 2], 4),  # positions 12 and 8 read index 1, and position 4 reads index 0 only
        ([1, 2, 3, 4], 0),
        ([1, 2, 4], 0),
    ],
)
def test_a_prefix_match_ends_at_the_last_page_with_a_cached_window(evicted: list[int], matched: int) -> None:
    world = World(shape(), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=1, ignore_eos=True)
    world.run()
    for page in evicted:
        world.lane.pool.evict(page)
    world.submit([*text(21), 200], max_new_tokens=1, ignore_eos=True)
    world.finish()
    assert first_positions(world) == [0, matched]


def test_equal_prompts_share_within_the_window() -> None:
    world = World(shape())
    for _ in range(2):
        world.submit(text(10), max_new_tokens=12, ignore_eos=True)
    world.tick()
    # Position 8 reads from 3 on.
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 4])]
    world.finish()


def test_samples_fork_within_the_window() -> None:
    world = World(shape())
    world.submit(text(19), max_new_tokens=12, num_samples=2, temperature=1.0, ignore_eos=True)
    world.tick()
    # Position 18 reads from 13 on: index 3, and two tokens of index 4, which are copied.
    assert starts(world) == [(0, [1, 2, 3, 4, 5]), (18, [0, 0, 0, 4, 6])]
    world.finish()


def test_a_preempted_request_resumes_without_the_pages_before_its_window() -> None:
    """Five pages. In the eleventh plan both need a page, for positions 16 and 8, and one page is unused."""
    world = World(shape(num_pages=6), greedy(plans_in_flight=1))
    victim = world.submit(text(7), max_new_tokens=20, ignore_eos=True)
    world.steps(8)
    world.submit(text(7, 100), max_new_tokens=3, ignore_eos=True, priority=1)
    world.steps(3)
    assert world.core.counters.preemptions == 1
    world.finish()
    first_position, pages = starts(world)[2]
    assert (first_position, [page > 0 for page in pages]) == (16, [False, False, True, True, True])
    stats = world.end(victim).stats
    assert (stats.output_tokens, stats.preemptions, stats.recomputed_tokens) == (20, 1, 0)
