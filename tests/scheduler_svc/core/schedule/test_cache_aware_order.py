"""Among the first that wait, whoever finds most of its prompt kept goes first, within bounds.

One row, pages of four tokens. What is kept is a stem of nine tokens: two full pages, of whichever tenant.
"""

import pytest

from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.core.schedule.policy import MAX_PASSED_OVER
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request_queue import WINDOW
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=64, max_rows=1)
STEM = list(range(9))


def warm(config: CoreConfig | None = None, *, salt: str = "", shape: Shape = SHAPE) -> World:
    """The stem is kept."""
    world = World(shape, config or greedy(max_waiting=200))
    world.submit(STEM, max_new_tokens=1, ignore_eos=True, salt=salt)
    world.run()
    world.sent.clear()
    return world


def cold(world: World, **options: object) -> int:
    """A prompt that nobody has seen."""
    number = len(world.streams) + 1
    return world.submit([100 + number % 100, number] * 5, **({"max_new_tokens": 1, "ignore_eos": True} | options))


def alike(world: World, num_tokens: int = 9, **options: object) -> int:
    """So many tokens of the stem, and one of its own."""
    number = len(world.streams) + 1
    return world.submit([*STEM[:num_tokens], 100 + number], **({"max_new_tokens": 1, "ignore_eos": True} | options))


def order(world: World) -> list[int]:
    """The streams in the order in which they got a row."""
    numbers = {tuple(stream.submit.prompt.tolist()): number for number, stream in world.streams.items()}
    prompts = [start.tokens[: start.num_prompt_tokens] for plan in world.sent for start in plan.starts]
    return [numbers[tuple(prompt.tolist())] for prompt in prompts]


def run(world: World) -> list[int]:
    world.run()
    world.check_all_ended()
    return order(world)


def lane(world: World) -> Lane:
    assert world.lane is not None
    return world.lane


def test_the_longest_cached_prefix_goes_first_then_arrival() -> None:
    world = warm()
    first, some, most, again, none = cold(world), alike(world, 4), alike(world), alike(world), cold(world)
    assert run(world) == [most, again, some, first, none]


def test_pages_cached_meanwhile_count() -> None:
    world = warm()
    one, other, of_one = cold(world), cold(world), 0
    of_one = world.submit([*world.streams[one].submit.prompt.tolist(), 7], max_new_tokens=1, ignore_eos=True)
    # Nothing of it is kept until the first has run.
    assert run(world) == [one, of_one, other]


def test_without_cache_aware_order_requests_go_first_come_first_served() -> None:
    world = warm(CoreConfig(policy=Policy(admission=Admission.KNOWN, cache_aware=False)))
    streams = [cold(world), alike(world), cold(world), alike(world)]
    assert run(world) == streams


def test_a_request_is_passed_over_a_bounded_number_of_times() -> None:
    world = warm()
    first = cold(world)
    others = [alike(world) for _ in range(MAX_PASSED_OVER + 8)]
    assert run(world) == [*others[:MAX_PASSED_OVER], first, *others[MAX_PASSED_OVER:]]


def test_only_the_first_waiting_requests_are_compared() -> None:
    world = warm()
    others = [cold(world) for _ in range(WINDOW)]
    beyond = alike(world)
    # It is one of the first once one of them has gone.
    assert run(world) == [others[0], beyond, *others[1:]]


def test_a_request_that_does_not_read_the_cache_passes_no_other() -> None:
    world = warm()
    streams = [cold(world), alike(world, cache_read=False), cold(world)]
    assert run(world) == streams


@pytest.mark.parametrize("kept_for", ["a", "b"])
def test_a_request_does_not_pass_another_tenant(kept_for: str) -> None:
    world = warm(salt=kept_for)
    # As if the warming had been long ago.
    world.core.queue.fair_share._last_finish.clear()
    streams = [cold(world, salt="a"), alike(world, salt="b"), alike(world, salt="a")]
    # Turn by turn: a's, b's, a's.
    assert run(world) == streams


def test_a_tenant_with_cached_prompts_does_not_delay_another_tenant() -> None:
    """If its requests passed its own cold one, which keeps its place, another tenant would wait for all of them."""
    world = warm(salt="greedy")
    world.core.queue.fair_share._last_finish.clear()
    first = cold(world, salt="greedy")
    others = [alike(world, salt="greedy") for _ in range(20)]
    another = cold(world, salt="another")
    assert run(world) == [first, another, *others]


def test_a_tenant_may_pass_itself_when_no_other_tenant_waits() -> None:
    world = warm(salt="a")
    world.core.queue.fair_share._last_finish.clear()
    first, other, second, kept = cold(world, salt="a"), cold(world, salt="b"), cold(world, salt="a"), 0
    kept = alike(world, salt="a")
    assert run(world) == [first, other, kept, second]


def test_a_request_does_not_pass_a_higher_priority() -> None:
    world = warm()
    urgent, normal = cold(world, priority=1), alike(world)
    assert run(world) == [urgent, normal]


def test_a_request_does_not_pass_a_suspect_that_does_not_fit_yet() -> None:
    world = warm(shape=Shape(page_size=4, num_pages=12, max_rows=3))
    runs = world.submit([200] * 9, max_new_tokens=12, ignore_eos=True)
    world.step()
    big = world.submit([201] * 33, max_new_tokens=1, ignore_eos=True)
    # As if its step had failed before: it is to run alone, and takes nine of eleven pages, of which three are in use.
    [request] = world.core.queue.by_request_id(f"r{big}")
    world.core.suspects.add(request.handle)
    kept = alike(world)
    for _ in range(3):
        world.step()
    assert order(world) == [runs]
    assert len(world.streams[runs].tokens) > 1, "the others run on"
    assert run(world) == [runs, big, kept]


def test_a_request_does_not_pass_a_head_with_pending_plans() -> None:
    """A preempted request whose plans are in flight is at the head: it cannot be admitted yet, and nobody else is."""
    world = warm(greedy(plans_in_flight=3), shape=Shape(page_size=4, num_pages=10, max_rows=3))
    older = world.submit([200] * 15, max_new_tokens=9, ignore_eos=True)
    victim = world.submit([201] * 15, max_new_tokens=9, ignore_eos=True)
    world.tick()
    # Four of nine pages each, full with the second plan; the third takes the last one for the older request.
    [waiting] = world.core.queue.by_request_id(f"r{victim}")
    assert (waiting.preemptions, waiting.pending_plans) == (1, 2)
    kept = alike(world)
    world.apply()
    world.deliver()
    world.tick()
    # There is a plan more, and of the four pages that were left the one that is kept would do.
    assert (len(world.sent), waiting.pending_plans) == (4, 1)
    assert order(world) == [older, victim]
    assert run(world) == [older, victim, victim, kept]
