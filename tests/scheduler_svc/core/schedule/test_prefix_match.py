"""What a request finds kept of its prompt: how far a hit goes, whom it may come from, what is told of it.

Pages have four tokens. Every world's content is checked: a hit of the wrong page changes the answer.
"""

import numpy as np
import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import chunks, first_positions, load, starts
from tests.scheduler_svc.core.world import CACHE_ROOT, World, greedy

POISON = 280
SHORT = Shape(num_pages=32)


def text(length: int, first: int = 0) -> list[int]:
    """Tokens that begin alike only where `first` is the same."""
    return [first + i for i in range(length)]


def asked(world: World, prompt: list[int], **options: object) -> int:
    """The prompt runs to its end; its first position."""
    number = len(first_positions(world))
    world.submit(prompt, **({"max_new_tokens": 1, "ignore_eos": True} | options))
    world.run()
    world.check_all_ended()
    return first_positions(world)[number]


# How far ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)]
)
def test_a_match_ends_at_a_page_edge_before_the_last_token(length: int, hit: int) -> None:
    world = World(SHORT)
    assert [asked(world, text(length)) for _ in range(3)] == [0, hit, hit]
    assert [world.end(stream).stats.cached_prompt_tokens for stream in (1, 2, 3)] == [0, hit, hit]


@pytest.mark.parametrize(("alike", "hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)])
def test_a_match_covers_the_common_full_pages(alike: int, hit: int) -> None:
    world = World(SHORT)
    asked(world, text(14))
    assert asked(world, text(alike) + text(14 - alike, 100)) == hit


def test_a_prompt_that_ends_at_a_page_edge_computes_its_last_page_again() -> None:
    world = World(SHORT)
    asked(world, text(8))
    asked(world, text(8))
    assert starts(world) == [(0, [1, 2]), (4, [1, 3])]
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 8)], [(1, 4, 4)]]
    assert world.lane is not None
    # Pages 1 and 2 have the names; what came out the same has none and goes first.
    assert world.lane.pool.free_pages()[0] == 3
    assert world.lane.pool.num_evictable == 2


def test_one_remaining_token_decodes_at_once() -> None:
    world = World(SHORT)
    asked(world, text(9))
    asked(world, text(9))
    [plan] = world.sent[1:]
    assert (chunks(plan), plan.decode_rows.tolist(), starts(world)[1]) == ([], [1], (8, [1, 2, 3]))


@pytest.mark.parametrize(("logprobs_from", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8)])
def test_positions_with_wanted_prompt_logprobs_are_computed(logprobs_from: int, hit: int) -> None:
    """The logprob of token p comes of position p - 1."""
    world = World(SHORT)
    asked(world, text(12))
    assert asked(world, text(12), prompt_logprobs_from=logprobs_from) == hit


def test_pages_of_a_running_prompt_are_matched_by_the_next_request() -> None:
    world = World(Shape(num_pages=32, token_budget=12), greedy(plans_in_flight=1))
    for _ in range(2):
        world.submit(text(18), max_new_tokens=1, ignore_eos=True)
    world.run()
    world.check_all_ended()
    # The second gets in where the first one's last chunk leaves room: all its full pages are planned by then.
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 12)], [(1, 12, 6), (2, 16, 2)]]


def test_a_prompt_page_is_cached_when_the_plan_that_fills_it_is_made() -> None:
    world = World(Shape(num_pages=32, token_budget=6), greedy(plans_in_flight=1))
    world.submit(text(13), max_new_tokens=1, ignore_eos=True)
    named: list[list[int]] = []
    for _ in range(3):
        world.tick()
        assert world.lane is not None
        named.append([page for page in range(1, 32) if world.lane.pool.hash_of(page)])
        world.apply()
        world.deliver()
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 6)], [(1, 6, 6)], []]
    assert named == [[1], [1, 2, 3], [1, 2, 3]]
    world.check_all_ended()


# Equal prompts in one step ----------------------------------------------------------------------------------------


def test_equal_prompts_in_one_step_share_pages() -> None:
    world = World(SHORT)
    for _ in range(3):
        world.submit(text(10), max_new_tokens=3, ignore_eos=True)
    world.tick()
    plan = world.sent[0]
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 4]), (8, [1, 2, 5])]
    assert chunks(plan) == [(1, 0, 10), (2, 8, 2), (3, 8, 2)]
    assert world.lane is not None
    assert [world.lane.pool.references(page) for page in range(1, 7)] == [3, 3, 1, 1, 1, 0]
    world.run()
    world.check_all_ended()


def test_a_longer_prompt_shares_the_pages_of_a_shorter_one_in_the_same_step() -> None:
    world = World(SHORT)
    world.submit(text(9), max_new_tokens=3, ignore_eos=True)
    world.submit(text(14), max_new_tokens=3, ignore_eos=True)
    world.tick()
    assert starts(world) == [(0, [1, 2, 3]), (8, [1, 2, 4, 5])]
    world.run()
    world.check_all_ended()


# Whose ------------------------------------------------------------------------------------------------------------


def test_requests_with_different_salts_share_no_pages() -> None:
    world = World(SHORT)
    salts = ["", "a", "b", "a", "", "b"]
    assert [asked(world, text(9), salt=salt) for salt in salts] == [0, 0, 0, 8, 8, 8]


def test_equal_prompts_with_different_salts_share_no_pages_in_one_step() -> None:
    world = World(SHORT)
    for salt in ("a", "b"):
        world.submit(text(9), max_new_tokens=1, ignore_eos=True, salt=salt)
    world.run()
    world.check_all_ended()
    assert first_positions(world) == [0, 0]


def test_without_a_prefix_root_nothing_is_matched_or_cached() -> None:
    world = World(SHORT)
    asked(world, text(9))
    assert asked(world, text(9), salt=None) == 0
    assert asked(world, text(9, 50), salt=None, max_new_tokens=8) == 0
    assert load(world).pages_cached == 2
    assert asked(world, text(9, 50)) == 0


def test_a_request_that_does_not_read_the_cache_still_fills_it() -> None:
    world = World(SHORT)
    assert asked(world, text(9), cache_read=False) == 0
    assert asked(world, text(9), cache_read=False) == 0
    assert asked(world, text(9)) == 8


def test_a_request_that_does_not_write_the_cache_still_reads_it() -> None:
    world = World(SHORT)
    assert asked(world, text(9), cache_write=False, max_new_tokens=8) == 0
    assert load(world).pages_cached == 0
    assert asked(world, text(9)) == 0
    assert asked(world, text(9), cache_write=False, max_new_tokens=8) == 8
    assert load(world).pages_cached == 2


def test_a_request_that_does_not_write_the_cache_shares_no_pages_in_its_step() -> None:
    world = World(SHORT)
    for options in ({"cache_write": False}, {}, {}):
        world.submit(text(9), max_new_tokens=1, ignore_eos=True, **options)
    world.run()
    world.check_all_ended()
    assert first_positions(world) == [0, 0, 8]


# Tokens are compared ----------------------------------------------------------------------------------------------


def forged(prompt: list[int]) -> bytes:
    return hash_pages(prefix_root(CACHE_ROOT, ""), np.array(prompt, np.int32), SHORT.page_size)


def test_pages_with_the_same_hash_and_other_tokens_do_not_match() -> None:
    world = World(SHORT)
    one, other = text(9), text(9, 100)
    asked(world, one)
    # As if SHA-256 had collided: the other's pages have the first one's names.
    assert asked(world, other, page_hashes=forged(one)) == 0
    assert load(world).pages_cached == 2
    assert asked(world, one) == 8
    # Nor the second page, where the first one is right.
    mixed = [*text(4), *text(5, 100)]
    assert asked(world, mixed, page_hashes=forged(one)) == 4


def test_pages_with_the_same_hash_and_other_tokens_do_not_match_in_one_step() -> None:
    world = World(SHORT)
    one, other = text(9), text(9, 100)
    world.submit(one, max_new_tokens=3, ignore_eos=True)
    world.submit(other, max_new_tokens=3, ignore_eos=True, page_hashes=forged(one))
    world.run()
    world.check_all_ended()
    assert starts(world) == [(0, [1, 2, 3]), (0, [4, 5, 6])]


def test_missing_page_hashes_are_computed_when_needed() -> None:
    world = World(SHORT)
    asked(world, text(13))
    assert asked(world, text(13), page_hashes=forged(text(4))) == 12
    assert asked(world, text(13), page_hashes=b"") == 12


# Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 4), (2, 4), (3, 8), (6, 8), (7, 12), (10, 12), (11, 16)])
def test_the_next_turn_of_a_chat_matches_prompt_and_output_pages(num_tokens: int, hit: int) -> None:
    """Six tokens were asked; of all that stand, the last answer's token was never computed."""
    world = World(SHORT)
    asked(world, text(6), max_new_tokens=num_tokens)
    turn = [*text(6), *world.streams[1].tokens, *text(3, 200)]
    assert len(turn) == 9 + num_tokens
    assert asked(world, turn) == hit


def test_an_output_page_is_cached_after_a_finite_sample_has_read_it() -> None:
    world = World(SHORT, greedy(plans_in_flight=2))
    world.submit(text(3), max_new_tokens=20, ignore_eos=True)
    world.step()
    # Token 3 is known; the plan that computes it, and fills the page, is in flight.
    turn = [*text(3), *world.streams[1].tokens, 250]
    assert len(turn) == 5
    world.submit(turn, max_new_tokens=1, ignore_eos=True)
    world.tick()
    assert first_positions(world) == [0, 0]
    world.apply()
    world.deliver()
    world.submit(turn, max_new_tokens=1, ignore_eos=True)
    world.tick()
    assert first_positions(world) == [0, 0, 4]
    world.run()
    world.check_all_ended()


# What is not finite -----------------------------------------------------------------------------------------------


def poisoned() -> World:
    world = World(SHORT, join=False)
    world.join(Faults(nonfinite_token=POISON))
    return world


def failed(world: World, prompt: list[int]) -> fx.Failure:
    stream = world.submit(prompt, max_new_tokens=3)
    world.run()
    failure = world.end(stream).failure
    assert failure is not None
    return failure


def test_pages_of_a_nonfinite_request_are_evicted() -> None:
    world = poisoned()
    assert failed(world, [*text(9), POISON]).code is fx.FailureCode.INTERNAL
    assert load(world).pages_cached == 0
    assert asked(world, text(9)) == 0


def test_verified_pages_of_a_nonfinite_request_stay_cached() -> None:
    world = poisoned()
    asked(world, text(5))
    failed(world, [*text(9), POISON])
    assert load(world).pages_cached == 1
    assert asked(world, text(9)) == 4


def test_only_requests_that_share_nonfinite_pages_end() -> None:
    world = poisoned()
    bad = [POISON, *text(8)]
    streams = [world.submit(prompt, max_new_tokens=3, ignore_eos=True) for prompt in (bad, bad, text(9))]
    world.run()
    world.check_content()
    assert [world.end(stream).failure is not None for stream in streams] == [True, True, False]
    assert first_positions(world) == [0, 8, 0]


# What is told -----------------------------------------------------------------------------------------------------


def test_the_load_counts_matched_tokens_and_cached_pages() -> None:
    world = World(SHORT)
    asked(world, text(9))
    asked(world, text(12))
    told = load(world)
    assert (told.prompt_tokens, told.cached_prompt_tokens) == (21, 8)
    assert (told.pages_used, told.pages_cached, told.pages_total) == (0, 3, 31)
    assert [(one.pages_used, one.pages_cached) for one in told.per_worker] == [(0, 3)]
    world.submit(text(12), max_new_tokens=9, ignore_eos=True)
    world.tick()
    told = load(world)
    # Two of the three kept pages are held again; a third page of its own.
    assert (told.pages_used, told.pages_cached, told.cached_prompt_tokens) == (4, 1, 16)


def test_a_resumed_prompt_counts_once_in_the_load() -> None:
    world = World(SHORT)
    stream = world.submit(text(9), max_new_tokens=4, ignore_eos=True)
    world.step()
    world.kill()
    world.join()
    world.run()
    told = load(world)
    assert (told.prompt_tokens, told.cached_prompt_tokens) == (9, 0)
    assert world.end(stream).stats.cached_prompt_tokens == 0
