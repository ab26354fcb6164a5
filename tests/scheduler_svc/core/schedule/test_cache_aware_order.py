"""Among the first waiting requests, the one with the longest cached prefix is admitted first, within bounds.

The worker has one row and pages of four tokens. A stem of nine tokens is cached, so two full pages.
"""

import pytest

from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.core.queue.turns import WINDOW
from scheduler_svc.core.schedule.policy import MAX_PASSED_OVER
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.sent_plans import order, run
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=64, max_rows=1)
STEM = list(range(9))


def warm(config: CoreConfig | None = None, *, salt: str = "", shape: Shape = SHAPE) -> World:
    """Returns a world in which the stem is cached, for the tenant of `salt`."""
    world = World(shape, config or greedy(max_waiting=200))
    world.submit(STEM, max_new_tokens=1, ignore_eos=True, salt=salt)
    world.run()
    world.sent.clear()
    return world


def cold(world: World, **options: object) -> int:
    """Submits a prompt without a cached prefix."""
    number = len(world.streams) + 1
    return world.submit([100 + number % 100, number] * 5, **({"max_new_tokens": 1, "ignore_eos": True} | options))


def with_stem(world: World, num_tokens: int = 9, **options: object) -> int:
    """Submits the first `num_tokens` tokens of the stem and one other token."""
    number = len(world.streams) + 1
    return world.submit([*STEM[:num_tokens], 100 + number], **({"max_new_tokens": 1, "ignore_eos": True} | options))


def test_the_longest_cached_prefix_goes_first_then_arrival() -> None:
    world = warm()
    first, some, most, again, none = cold(world), with_stem(world, 4), with_stem(world), with_stem(world), cold(world)
    assert run(world) == [most, again, some, first, none]


def test_pages_cached_after_submission_change_the_order() -> None:
    world = warm()
    one, other = cold(world), cold(world)
    of_one = world.submit([*world.streams[one].submit.prompt.tolist(), 7], max_new_tokens=1, ignore_eos=True)
    # No page of the last request is cached until the first one has run.
    assert run(world) == [one, of_one, other]


def test_without_cache_aware_order_requests_go_first_come_first_served() -> None:
    world = warm(CoreConfig(policy=Policy(admission=Admission.KNOWN, cache_aware=False)))
    streams = [cold(world), with_stem(world), cold(world), with_stem(world)]
    assert run(world) == streams


def test_a_request_is_passed_over_a_bounded_number_of_times() -> None:
    world = warm()
    first = cold(world)
    others = [with_stem(world) for _ in range(MAX_PASSED_OVER + 8)]
    assert run(world) == [*others[:MAX_PASSED_OVER], first, *others[MAX_PASSED_OVER:]]


def test_only_the_first_waiting_requests_are_compared() -> None:
    world = warm()
    others = [cold(world) for _ in range(WINDOW)]
    beyond = with_stem(world)
    # It is among the first as soon as one of them has been admitted.
    assert run(world) == [others[0], beyond, *others[1:]]


def test_a_request_that_does_not_read_the_cache_passes_no_other() -> None:
    world = warm()
    streams = [cold(world), with_stem(world, cache_read=False), cold(world)]
    assert run(world) == streams


@pytest.mark.parametrize("cached_for", ["a", "b"])
def test_a_request_does_not_pass_another_tenant(cached_for: str) -> None:
    world = warm(salt=cached_for)
    # As if the stem had been computed long ago.
    world.core.queue.tenants[""].fair_share._last_finish.clear()
    streams = [cold(world, salt="a"), with_stem(world, salt="b"), with_stem(world, salt="a")]
    # The tenants take turns: a, b, a.
    assert run(world) == streams


def test_a_tenant_with_cached_prompts_does_not_delay_another_tenant() -> None:
    """If they passed their tenant's own first request, which keeps its place, the other tenant would wait for all."""
    world = warm(salt="greedy")
    world.core.queue.tenants[""].fair_share._last_finish.clear()
    first = cold(world, salt="greedy")
    others = [with_stem(world, salt="greedy") for _ in range(20)]
    another = cold(world, salt="another")
    assert run(world) == [first, another, *others]


def test_a_tenant_may_pass_itself_when_no_other_tenant_waits() -> None:
    world = warm(salt="a")
    world.core.queue.tenants[""].fair_share._last_finish.clear()
    first, other, second = cold(world, salt="a"), cold(world, salt="b"), cold(world, salt="a")
    cached = with_stem(world, salt="a")
    assert run(world) == [first, other, cached, second]


def test_a_request_does_not_pass_a_higher_priority() -> None:
    world = warm()
    urgent, normal = cold(world, priority=1), with_stem(world)
    assert run(world) == [urgent, normal]


def test_a_request_does_not_pass_a_suspect_that_does_not_fit_yet() -> None:
    world = warm(shape=Shape(page_size=4, num_pages=12, max_rows=3))
    runs = world.submit([200] * 9, max_new_tokens=12, ignore_eos=True)
    world.step()
    big = world.submit([201] * 33, max_new_tokens=1, ignore_eos=True)
    # As if its step had failed: it must run alone and needs nine of the eleven pages, of which three are used.
    [request] = world.core.queue.by_request_id(f"r{big}")
    world.core.suspects.restore([request])
    cached = with_stem(world)
    world.steps(3)
    assert order(world) == [runs]
    assert len(world.streams[runs].tokens) > 1, "the other requests run on"
    assert run(world) == [runs, big, cached]


def test_a_request_does_not_pass_a_head_with_pending_plans() -> None:
    """The head is a preempted request with pending plans. It cannot be admitted yet, and no other request may pass."""
    world = warm(greedy(plans_in_flight=3), shape=Shape(page_size=4, num_pages=10, max_rows=3))
    older = world.submit([200] * 15, max_new_tokens=9, ignore_eos=True)
    victim = world.submit([201] * 15, max_new_tokens=9, ignore_eos=True)
    world.tick()
    # Each has four of nine pages, full with the second plan. The third plan takes the last page for the older request.
    [waiting] = world.core.queue.by_request_id(f"r{victim}")
    assert (waiting.preemptions, waiting.pending_plans) == (1, 2)
    cached = with_stem(world)
    world.work()
    world.tick()
    # The lane planned once more, and the cached request would have fitted in the four unused pages.
    assert (len(world.sent), waiting.pending_plans) == (4, 1)
    assert order(world) == [older, victim]
    assert run(world) == [older, victim, victim, cached]
