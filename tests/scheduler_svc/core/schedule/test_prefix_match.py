"""Prefix matches: how far they reach, which requests share pages, and what the load reports of them.

Pages have four tokens. The content of every world is checked, so a match of a wrong page changes the output.
"""

import numpy as np
import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import chunks, first_positions, load, starts
from tests.scheduler_svc.core.world import CACHE_ROOT, World, greedy, text

POISON = 280
SHAPE = Shape(num_pages=32)


def run(world: World, prompt: list[int], **options: object) -> int:
    """Runs the prompt to its end and returns its first position, the number of tokens that were cached."""
    number = len(first_positions(world))
    world.submit(prompt, **({"max_new_tokens": 1, "ignore_eos": True} | options))
    world.finish()
    return first_positions(world)[number]


# The length of a match --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "matched"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)]
)
def test_a_match_ends_at_a_page_edge_before_the_last_token(world: World, length: int, matched: int) -> None:
    assert [run(world, text(length)) for _ in range(3)] == [0, matched, matched]
    assert [world.end(stream).stats.cached_prompt_tokens for stream in (1, 2, 3)] == [0, matched, matched]


@pytest.mark.parametrize(("common", "matched"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)])
def test_a_match_covers_the_common_full_pages(world: World, common: int, matched: int) -> None:
    run(world, text(14))
    assert run(world, text(common) + text(14 - common, 100)) == matched


def test_a_prompt_that_ends_at_a_page_edge_computes_its_last_page_again(world: World) -> None:
    run(world, text(8))
    run(world, text(8))
    assert starts(world) == [(0, [1, 2]), (4, [1, 3])]
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 8)], [(1, 4, 4)]]
    # Pages 1 and 2 are cached. Page 3 has the same tokens as page 2 but is not cached, so it is allocated first.
    assert world.lane.pool.free_pages()[0] == 3
    assert world.lane.pool.num_evictable == 2


def test_one_remaining_token_decodes_at_once(world: World) -> None:
    run(world, text(9))
    run(world, text(9))
    [plan] = world.sent[1:]
    assert (chunks(plan), plan.decode_rows.tolist(), starts(world)[1]) == ([], [1], (8, [1, 2, 3]))


@pytest.mark.parametrize(("logprobs_from", "matched"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8)])
def test_positions_with_wanted_prompt_logprobs_are_computed(world: World, logprobs_from: int, matched: int) -> None:
    """The logprob of token p needs the logits of position p - 1."""
    run(world, text(12))
    assert run(world, text(12), prompt_logprobs_from=logprobs_from) == matched


def test_pages_of_a_running_prompt_are_matched_by_the_next_request() -> None:
    world = World(Shape(num_pages=32, token_budget=12), greedy(plans_in_flight=1))
    for _ in range(2):
        world.submit(text(18), max_new_tokens=1, ignore_eos=True)
    world.finish()
    # The second request is admitted beside the first one's last chunk, when all of its full pages are planned.
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 12)], [(1, 12, 6), (2, 16, 2)]]


def test_a_prompt_page_is_cached_when_the_plan_that_fills_it_is_made() -> None:
    world = World(Shape(num_pages=32, token_budget=6), greedy(plans_in_flight=1))
    world.submit(text(13), max_new_tokens=1, ignore_eos=True)
    cached: list[list[int]] = []
    for _ in range(3):
        world.tick()
        cached.append([page for page in range(1, 32) if world.lane.pool.hash_of(page)])
        world.work()
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 6)], [(1, 6, 6)], []]
    assert cached == [[1], [1, 2, 3], [1, 2, 3]]
    world.check_all_ended()


# Equal prompts in one step ----------------------------------------------------------------------------------------


def test_equal_prompts_in_one_step_share_pages(world: World) -> None:
    for _ in range(3):
        world.submit(text(10), max_new_tokens=3, ignore_eos=True)
    world.tick()
    plan = world.sent[0]
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 4]), (8, [1, 2, 5])]
    assert chunks(plan) == [(1, 0, 10), (2, 8, 2), (3, 8, 2)]
    assert [world.lane.pool.references(page) for page in range(1, 7)] == [3, 3, 1, 1, 1, 0]
    world.finish()


def test_a_longer_prompt_shares_the_pages_of_a_shorter_one_in_the_same_step(world: World) -> None:
    world.submit(text(9), max_new_tokens=3, ignore_eos=True)
    world.submit(text(14), max_new_tokens=3, ignore_eos=True)
    world.tick()
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 4, 5])]
    world.finish()


# Salts and cache options ------------------------------------------------------------------------------------------


def test_requests_with_different_salts_share_no_pages(world: World) -> None:
    salts = ["", "a", "b", "a", "", "b"]
    assert [run(world, text(9), salt=salt) for salt in salts] == [0, 0, 0, 8, 8, 8]


def test_without_a_prefix_root_nothing_is_matched_or_cached(world: World) -> None:
    run(world, text(9))
    assert run(world, text(9), salt=None) == 0
    assert run(world, text(9, 50), salt=None, max_new_tokens=8) == 0
    assert load(world).pages_cached == 2
    assert run(world, text(9, 50)) == 0


def test_a_request_that_does_not_read_the_cache_still_fills_it(world: World) -> None:
    assert run(world, text(9), cache_read=False) == 0
    assert run(world, text(9), cache_read=False) == 0
    assert run(world, text(9)) == 8


def test_a_request_that_does_not_write_the_cache_still_reads_it(world: World) -> None:
    assert run(world, text(9), cache_write=False, max_new_tokens=8) == 0
    assert load(world).pages_cached == 0
    assert run(world, text(9)) == 0
    assert run(world, text(9), cache_write=False, max_new_tokens=8) == 8
    assert load(world).pages_cached == 2


def test_a_request_of_another_salt_or_that_does_not_write_the_cache_shares_no_pages_in_its_step(world: World) -> None:
    for options in ({"cache_write": False}, {"salt": "another"}, {}, {}):
        world.submit(text(9), max_new_tokens=1, ignore_eos=True, **options)
    world.finish()
    assert first_positions(world) == [0, 0, 0, 8]


# Hash collisions --------------------------------------------------------------------------------------------------


def hashes_for(prompt: list[int]) -> bytes:
    return hash_pages(prefix_root(CACHE_ROOT, ""), np.array(prompt, np.int32), SHAPE.page_size)


def test_pages_with_the_same_hash_and_other_tokens_do_not_match(world: World) -> None:
    one, other = text(9), text(9, 100)
    run(world, one)
    # As if SHA-256 had collided: the second prompt's pages have the hashes of the first one's.
    assert run(world, other, page_hashes=hashes_for(one)) == 0
    assert load(world).pages_cached == 2
    assert run(world, one) == 8
    # The second page does not match either if only the first one has the right tokens.
    mixed = [*text(4), *text(5, 100)]
    assert run(world, mixed, page_hashes=hashes_for(one)) == 4


def test_pages_with_the_same_hash_and_other_tokens_do_not_match_in_one_step(world: World) -> None:
    one, other = text(9), text(9, 100)
    world.submit(one, max_new_tokens=3, ignore_eos=True)
    world.submit(other, max_new_tokens=3, ignore_eos=True, page_hashes=hashes_for(one))
    world.finish()
    assert starts(world) == [(0, [1, 2, 3]), (0, [4, 5, 6])]


def test_missing_page_hashes_are_computed_when_needed(world: World) -> None:
    run(world, text(13))
    assert run(world, text(13), page_hashes=hashes_for(text(4))) == 12
    assert run(world, text(13), page_hashes=b"") == 12


# Output pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "matched"), [(1, 4), (2, 4), (3, 8), (6, 8), (7, 12), (10, 12), (11, 16)])
def test_the_next_turn_of_a_chat_matches_prompt_and_output_pages(world: World, num_tokens: int, matched: int) -> None:
    """The prompt has six tokens. The last output token was never computed, so its page cannot match."""
    run(world, text(6), max_new_tokens=num_tokens)
    turn = [*text(6), *world.streams[1].tokens, *text(3, 200)]
    assert len(turn) == 9 + num_tokens
    assert run(world, turn) == matched


def test_an_output_page_is_cached_after_a_finite_sample_has_read_it() -> None:
    world = World(SHAPE, greedy(plans_in_flight=2))
    world.submit(text(3), max_new_tokens=20, ignore_eos=True)
    world.step()
    # Token 3 is known. The plan that computes it, and so fills the page, is in flight.
    turn = [*text(3), *world.streams[1].tokens, 250]
    assert len(turn) == 5
    world.submit(turn, max_new_tokens=1, ignore_eos=True)
    world.tick()
    assert first_positions(world) == [0, 0]
    world.work()
    world.submit(turn, max_new_tokens=1, ignore_eos=True)
    world.tick()
    assert first_positions(world) == [0, 0, 4]
    world.finish()


# Values that are not finite ---------------------------------------------------------------------------------------


def poisoned() -> World:
    return World(SHAPE, faults=Faults(nonfinite_token=POISON))


def failed(world: World, prompt: list[int]) -> fx.Failure:
    stream = world.submit(prompt, max_new_tokens=3)
    world.run()
    return world.failure(stream)


def test_pages_of_a_nonfinite_request_are_evicted() -> None:
    world = poisoned()
    assert failed(world, [*text(9), POISON]).code is fx.FailureCode.INTERNAL
    assert load(world).pages_cached == 0
    assert run(world, text(9)) == 0


def test_verified_pages_of_a_nonfinite_request_stay_cached() -> None:
    world = poisoned()
    run(world, text(5))
    failed(world, [*text(9), POISON])
    assert load(world).pages_cached == 1
    assert run(world, text(9)) == 4


def test_only_requests_that_share_nonfinite_pages_end() -> None:
    world = poisoned()
    bad = [POISON, *text(8)]
    streams = [world.submit(prompt, max_new_tokens=3, ignore_eos=True) for prompt in (bad, bad, text(9))]
    world.settle()
    assert [world.end(stream).failure is not None for stream in streams] == [True, True, False]
    assert first_positions(world) == [0, 8, 0]


# The load ---------------------------------------------------------------------------------------------------------


def test_the_load_counts_matched_tokens_and_cached_pages(world: World) -> None:
    run(world, text(9))
    run(world, text(12))
    report = load(world)
    assert (report.prompt_tokens, report.cached_prompt_tokens) == (21, 8)
    assert (report.pages_used, report.pages_cached, report.pages_total) == (0, 3, 31)
    assert [(one.pages_used, one.pages_cached) for one in report.per_worker] == [(0, 3)]
    world.submit(text(12), max_new_tokens=9, ignore_eos=True)
    world.tick()
    report = load(world)
    # The running request uses two of the three cached pages again, and two of its own.
    assert (report.pages_used, report.pages_cached, report.cached_prompt_tokens) == (4, 1, 16)


def test_the_load_counts_the_prompt_of_a_resumed_request_once(world: World) -> None:
    stream = world.submit(text(9), max_new_tokens=4, ignore_eos=True)
    world.step()
    world.restart()
    world.run()
    report = load(world)
    assert (report.prompt_tokens, report.cached_prompt_tokens) == (9, 0)
    assert world.end(stream).stats.cached_prompt_tokens == 0
