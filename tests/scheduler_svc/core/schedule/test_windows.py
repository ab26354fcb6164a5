"""Sliding windows: a row gives up a page as soon as nothing will read it again, and takes pages chunk by chunk.

Pages have four tokens, the window is six where nothing else is said: position p sees p - 5 to p, and the sinks.
"""

import pytest

from scheduler_svc.core.scheduler import CoreConfig
from scheduler_svc.core.state.lane import Lane
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import chunks, first_positions, flush, load, starts
from tests.scheduler_svc.core.world import World, greedy


def text(length: int, first: int = 0) -> list[int]:
    return [first + i for i in range(length)]


def shape(num_pages: int = 32, **settings: int) -> Shape:
    return Shape(**({"page_size": 4, "num_pages": num_pages, "window": 6, "max_length": 256} | settings))


def lane(world: World) -> Lane:
    assert world.lane is not None
    return world.lane


def held(world: World, row: int = 1) -> list[int]:
    """The logical indices of the pages that the row holds."""
    pages = lane(world).rows.pages[row]
    held_from = int(lane(world).rows.held_from[row])
    indices = [i for i in range(len(pages)) if i >= held_from or i < lane(world).sink_pages]
    assert [pages[i] for i in indices] == lane(world).held_pages(row)
    return indices


# Giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("sinks", [0, 1, 4, 5])
def test_a_row_holds_only_the_pages_that_its_next_position_reads(window: int, sinks: int) -> None:
    world = World(shape(window=window, sink_tokens=sinks), greedy(plans_in_flight=1))
    world.submit(text(7), max_new_tokens=20, ignore_eos=True)
    for _ in range(19):
        world.tick()
        planned = int(lane(world).rows.planned[1])
        seen = {*range(planned - window + 1, planned), *range(sinks)}
        pages = {position // 4 for position in seen if 0 <= position < planned}
        # A sink page is held although its sinks may end before it does; the page that is being filled too.
        if planned % 4:
            pages.add(planned // 4)
        assert held(world) == sorted(pages)
        world.apply()
        world.deliver()
    world.run()
    world.check_all_ended()


def test_a_page_behind_the_window_is_released_at_once_and_allocated_again() -> None:
    world = World(shape(num_pages=4), greedy(plans_in_flight=3))
    world.submit(text(7), max_new_tokens=12, ignore_eos=True)
    world.run()
    world.check_all_ended()
    given = [
        (int(lane_row), int(page))
        for plan in world.sent
        for lane_row, page in zip(plan.append_rows, plan.append_pages, strict=True)
    ]
    # Seven tokens, then one each: pages are due for positions 8, 12 and 16, at plans 3, 7 and 11. Page 1 is behind
    # from position 9 on, page 2 from 13 on: of three pages all go round.
    assert starts(world) == [(0, [1, 2])]
    assert [plan.step for plan in world.sent if len(plan.append_rows)] == [3, 7, 11]
    assert given == [(1, 3), (1, 1), (1, 2)]


def test_without_a_window_no_page_is_released() -> None:
    world = World(shape(window=0), greedy(plans_in_flight=1))
    world.submit(text(7), max_new_tokens=20, ignore_eos=True)
    for _ in range(19):
        world.step()
    assert held(world) == list(range(7))


def test_a_request_does_not_verify_a_page_that_it_released() -> None:
    """One page, and a window of one token: it is free as soon as the first one's plan is made. The next one gets it,
    and writes to it what is not finite, before the first one ends."""
    world = World(shape(num_pages=2, window=1), greedy(plans_in_flight=2), join=False)
    world.join(Faults(nonfinite_token=280))
    world.submit(text(4), max_new_tokens=1, ignore_eos=True)
    world.submit([1, 280], max_new_tokens=3, ignore_eos=True)
    heir = world.submit([2, 2], max_new_tokens=3, ignore_eos=True)
    world.run()
    world.check_content()
    assert starts(world) == [(0, [1])] * 3
    assert [plan.zero_pages.tolist() for plan in world.sent if plan.starts] == [[], [1], [1]]
    assert len(world.streams[heir].tokens) == 3


def test_a_row_that_leaves_does_not_verify_a_page_that_it_released() -> None:
    """Pages and window of one token: the first row's page is free once its plan is made. The second row gets it and
    writes values that are not finite; the first row ends in between. The third row must find the page zeroed."""
    world = World(shape(num_pages=6, page_size=1, window=1, max_rows=3), greedy(plans_in_flight=2), join=False)
    world.join(Faults(nonfinite_token=280))
    for prompt in ([7], [280]):
        world.submit(prompt, max_new_tokens=1, ignore_eos=True, salt=None)
        world.tick()
    while world.apply() or world.deliver():
        pass
    heir = world.submit([2], max_new_tokens=1, ignore_eos=True, salt=None)
    world.run()
    world.check_content()
    assert starts(world) == [(0, [1])] * 3
    assert [plan.zero_pages.tolist() for plan in world.sent] == [[], [1], [1]]
    assert len(world.streams[heir].tokens) == 1


# Longer than the pool ---------------------------------------------------------------------------------------------


def test_a_sequence_longer_than_the_pool_completes() -> None:
    """Five pages; fifty tokens and six more: chunks are cut to the pages that are there."""
    world = World(shape(num_pages=6), greedy(plans_in_flight=1))
    stream = world.submit(text(50), max_new_tokens=6, ignore_eos=True)
    world.run()
    world.check_all_ended()
    # After the first twenty positions the next sees from 15 on: pages 3 and 4 of five are held, three are free.
    assert [chunk for plan in world.sent for chunk in chunks(plan)] == [
        (1, 0, 20), (1, 20, 12), (1, 32, 12), (1, 44, 6)
    ]  # fmt: skip
    assert len(world.streams[stream].tokens) == 6


@pytest.mark.parametrize("num_pages", [4, 5, 6, 7, 9])
@pytest.mark.parametrize("sinks", [0, 3])
def test_several_long_sequences_share_a_pool_smaller_than_each(num_pages: int, sinks: int) -> None:
    world = World(shape(num_pages=num_pages + (sinks > 0), sink_tokens=sinks, max_rows=3))
    for first in (0, 50, 100, 150):
        world.submit(text(40, first), max_new_tokens=30, ignore_eos=True)
    world.run()
    world.check_all_ended()
    assert [len(stream.tokens) for stream in world.streams.values()] == [30] * 4


def test_a_first_chunk_leaves_the_headroom_of_the_running_rows() -> None:
    """Ten pages, a row holds three. A chunk as large as what is unused would leave nothing, and so not get in."""
    world = World(shape(num_pages=11, max_rows=4), CoreConfig(plans_in_flight=1))
    for first in (0, 100):
        world.submit(text(40, first), max_new_tokens=40, ignore_eos=True)
    for _ in range(8):
        world.step()
    assert world.core.counters.preemptions == 0
    assert lane(world).rows.num_seated == 2
    world.run()
    world.check_all_ended()


def test_a_request_too_large_for_its_window_is_rejected_with_the_numbers() -> None:
    world = World(shape(num_pages=4, sink_tokens=1))
    # The sinks' page, and three that a window of six touches while it moves.
    rejected = world.streams[world.submit(text(13), max_new_tokens=5)].rejected
    assert rejected is not None
    assert rejected.message == ("prompt (13 tokens) and max_new_tokens (5) take 4 pages of 4 tokens; the pool has 3")
    fits = world.submit(text(8), max_new_tokens=5, ignore_eos=True)
    world.run()
    assert len(world.streams[fits].tokens) == 5


def test_prompts_that_starve_each_other_are_resolved_in_the_same_tick() -> None:
    """Four pages. The first tells logprobs, four a step; the second gets in beside it, and both need a page more."""
    world = World(shape(num_pages=5, max_rows=2, spare_logit_rows=4), greedy(plans_in_flight=1))
    world.submit(text(20), max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=1)
    world.submit(text(20, 100), max_new_tokens=3, ignore_eos=True)
    for _ in range(2):
        world.step()
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 4), (2, 0, 12)], [(1, 4, 4)]]
    assert [held(world, row) for row in (1, 2)] == [[0, 1], [1, 2]]
    world.tick()
    # The newer one gives way, and the older one goes on in the plan of this very tick.
    assert chunks(world.sent[2]) == [(1, 8, 4)]
    assert world.core.counters.preemptions == 1
    world.run()
    world.check_all_ended()
    assert [world.end(stream).stats.preemptions for stream in (1, 2)] == [0, 1]


# Hits -------------------------------------------------------------------------------------------------------------


def test_a_prefix_match_needs_only_the_pages_in_the_window() -> None:
    world = World(shape(), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=1, ignore_eos=True)
    world.run()
    world.submit([*text(21), 200], max_new_tokens=1, ignore_eos=True)
    world.run()
    world.check_all_ended()
    # Position 20 sees from 15 on: pages 3 and 4. The list names none of those before.
    assert starts(world) == [(0, [1, 2, 3, 4, 5, 6]), (20, [0, 0, 0, 4, 5, 6])]


def test_a_prefix_match_needs_the_sink_pages() -> None:
    world = World(shape(sink_tokens=3), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=1, ignore_eos=True)
    world.run()
    world.submit([*text(21), 200], max_new_tokens=1, ignore_eos=True)
    world.run()
    world.check_all_ended()
    assert starts(world)[1] == (20, [1, 0, 0, 4, 5, 6])
    lane(world).pool.evict(1)
    world.submit([*text(21), 201], max_new_tokens=1, ignore_eos=True)
    world.run()
    assert first_positions(world)[2] == 0


@pytest.mark.parametrize(
    ("gone", "hit"),
    [
        ([1, 2, 3], 20),  # behind the window
        ([5], 16),  # position 16 sees from 11 on: pages 2 and 3 of the list
        ([4], 12),
        ([4, 1], 12),
        ([4, 2], 4),  # position 12 sees from 7 on, and so does 8; position 4 sees page 0 alone
        ([1, 2, 3, 4], 0),
        ([1, 2, 4], 0),
    ],
)
def test_a_prefix_match_ends_at_the_last_page_with_a_cached_window(gone: list[int], hit: int) -> None:
    world = World(shape(), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=1, ignore_eos=True)
    world.run()
    for page in gone:
        lane(world).pool.evict(page)
    world.submit([*text(21), 200], max_new_tokens=1, ignore_eos=True)
    world.run()
    world.check_all_ended()
    assert first_positions(world) == [0, hit]


def test_equal_prompts_share_within_the_window() -> None:
    world = World(shape())
    for _ in range(2):
        world.submit(text(10), max_new_tokens=12, ignore_eos=True)
    world.tick()
    # Position 8 sees from 3 on.
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 4])]
    world.run()
    world.check_all_ended()


def test_samples_fork_within_the_window() -> None:
    world = World(shape())
    world.submit(text(19), max_new_tokens=12, num_samples=2, temperature=1.0, ignore_eos=True)
    world.tick()
    # Position 18 sees from 13 on: page 3, and two tokens of page 4, which are copied.
    assert starts(world) == [(0, [1, 2, 3, 4, 5]), (18, [0, 0, 0, 4, 6])]
    world.run()
    world.check_all_ended()


def test_a_preempted_request_resumes_without_the_pages_behind_its_window() -> None:
    """Five pages. Both need one for positions 16 and 8 of the eleventh plan, and one is left."""
    world = World(shape(num_pages=6), greedy(plans_in_flight=1))
    victim = world.submit(text(7), max_new_tokens=20, ignore_eos=True)
    for _ in range(8):
        world.step()
    world.submit(text(7, 100), max_new_tokens=3, ignore_eos=True, priority=1)
    for _ in range(3):
        world.step()
    assert world.core.counters.preemptions == 1
    world.run()
    world.check_all_ended()
    first_position, pages = starts(world)[2]
    assert (first_position, [page > 0 for page in pages]) == (16, [False, False, True, True, True])
    stats = world.end(victim).stats
    assert (stats.output_tokens, stats.preemptions, stats.recomputed_tokens) == (20, 1, 0)


def test_a_flush_leaves_rows_their_pages() -> None:
    world = World(shape(), greedy(plans_in_flight=1))
    world.submit(text(21), max_new_tokens=8, ignore_eos=True)
    world.step()
    assert load(world).pages_cached == 4
    # Four behind the window and one that is held; the last is not full.
    assert flush(world) == 5
    world.run()
    world.check_all_ended()
