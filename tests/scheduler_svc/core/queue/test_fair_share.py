"""The order of the queue: tenants get equal shares, priority is a head start in tokens, and no request starves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.core.queue.turns import AGEING_TOKENS, FairShare
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.sent_plans import order, run
from tests.scheduler_svc.core.world import World, greedy

# One request at a time.
SHAPE = Shape(max_rows=1, num_pages=16)


def ask(world: World, salt: str | None = "", *, max_new_tokens: int = 1, **options: object) -> int:
    """Submits a prompt of two tokens that no other stream has."""
    number = len(world.streams) + 1
    return world.submit(
        [number % 200, number // 200], max_new_tokens=max_new_tokens, ignore_eos=True, salt=salt, **options
    )


# FairShare ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", ["", None], ids=["one salt", "no prefix root"])
@pytest.mark.parametrize("priority", [-2, 0, 3])
def test_a_single_tenant_is_served_first_come_first_served(world: World, salt: str | None, priority: int) -> None:
    streams = [ask(world, salt, priority=priority, max_new_tokens=1 + 7 * i % 5) for i in range(12)]
    assert run(world) == streams


def test_a_hundred_requests_of_one_tenant_do_not_delay_another_tenant() -> None:
    world = World(SHAPE, greedy(max_waiting=200))
    greedy_ones = [ask(world, "greedy") for _ in range(100)]
    other = ask(world, "other")
    assert run(world) == [greedy_ones[0], other, *greedy_ones[1:]]


def test_without_fair_share_a_tenant_waits_for_all_earlier_requests() -> None:
    policy = Policy(admission=Admission.KNOWN, fair_share=False)
    world = World(SHAPE, CoreConfig(policy=policy, max_waiting=200))
    greedy_ones = [ask(world, "greedy") for _ in range(20)]
    other = ask(world, "other")
    assert run(world) == [*greedy_ones, other]


def test_an_idle_tenant_gets_no_credit(world: World) -> None:
    early = [ask(world, "a") for _ in range(6)]
    world.steps(3)
    # Three requests of tenant a were admitted. Tenant b starts at the virtual time, which is the third one's start.
    assert order(world) == early[:3]
    late = [ask(world, "b") for _ in range(3)]
    assert run(world) == [*early[:3], late[0], early[3], late[1], early[4], late[2], early[5]]


def test_the_share_counts_tokens_not_requests(world: World) -> None:
    # The cost is the prompt and max_new_tokens: twelve tokens against six.
    a = [ask(world, "a", max_new_tokens=10) for _ in range(3)]
    b = [ask(world, "b", max_new_tokens=4) for _ in range(5)]
    # Virtual starts of a: 0, 12, 24, and of b: 0, 6, 12, 18, 24. Equal ones go by arrival.
    assert run(world) == [a[0], b[0], b[1], a[1], b[2], b[3], a[2], b[4]]


def test_each_sample_costs_as_much_as_a_request(world: World) -> None:
    world.submit([1, 1], num_samples=3, max_new_tokens=1, ignore_eos=True, salt="a")
    other = ask(world, "b")
    run(world)
    assert order(world)[1] == other


# Priority ---------------------------------------------------------------------------------------------------------


def test_a_higher_priority_goes_first_within_and_across_tenants(world: World) -> None:
    low = [ask(world, salt) for salt in ("a", "a", "b")]
    high = [ask(world, salt, priority=1) for salt in ("b", "a")]
    # The virtual starts of the high ones are 3 for b and 6 for a. A step of priority outweighs both.
    assert run(world) == [*high, low[0], low[2], low[1]]


def test_a_low_priority_request_does_not_starve() -> None:
    """Each request of the higher priority costs a quarter of the head start of one step of priority."""
    cost = AGEING_TOKENS // 4
    shape = Shape(page_size=64, num_pages=2 + cost // 64, max_length=cost, max_rows=1, token_budget=64)
    world = World(shape)
    low = world.submit([1], max_new_tokens=cost - 1, ignore_eos=True)
    # The next requests of the tenant start at one, two and so on quarters, less a head start of four quarters.
    high = [world.submit([1, i], max_new_tokens=cost - 2, ignore_eos=True, priority=1) for i in range(6)]
    while world.core.queue.num_waiting or world.core.queue.by_request_id("r7"):
        world.step()
        for stream in (low, *high):
            if world.streams[stream].tokens:
                world.cancel(stream)
    # The third high request starts at three quarters. The fourth starts where the low one does, but arrived later.
    assert order(world) == [*high[:3], low, *high[3:]]


def test_a_preempted_request_keeps_its_place() -> None:
    world = World(Shape(page_size=4, num_pages=6, max_rows=2), greedy(plans_in_flight=1))
    world.submit([1] * 7, max_new_tokens=5, ignore_eos=True)
    world.submit([2] * 7, max_new_tokens=9, ignore_eos=True)
    later = world.submit([3] * 7, max_new_tokens=2, ignore_eos=True)
    run(world)
    assert order(world) == [1, 2, 2, later]


# FairShare by itself ----------------------------------------------------------------------------------------------


def test_a_virtual_start_is_the_later_of_tenant_and_service() -> None:
    fair_share = FairShare()
    assert [
        fair_share.enter(b"a", 10),
        fair_share.enter(b"a", 5),
        fair_share.enter(b"b", 3),
        fair_share.enter(b"a", 1),
    ] == [0, 10, 0, 15]
    fair_share.admitted(12)
    assert [fair_share.enter(b"b", 1), fair_share.enter(b"c", 1), fair_share.enter(b"a", 1)] == [12, 12, 16]
    # The virtual time does not go back.
    fair_share.admitted(3)
    assert fair_share.enter(b"d", 1) == 12


def test_pruning_drops_only_tenants_that_equal_new_ones() -> None:
    fair_share = FairShare()
    for i in range(200):
        fair_share.enter(i.to_bytes(2), 10)
    fair_share.enter(b"far", 1000)
    fair_share.admitted(50)
    fair_share.prune(num_live=100)
    assert len(fair_share._last_finish) == 201
    fair_share.prune(num_live=1)
    assert fair_share._last_finish == {b"far": 1000}
    assert [fair_share.enter((3).to_bytes(2), 1), fair_share.enter(b"far", 1)] == [50, 1000]


def test_pruning_advances_the_virtual_time_if_too_many_tenants_are_ahead() -> None:
    fair_share = FairShare()
    for i in range(200):
        fair_share.enter(i.to_bytes(2), 10 * (i + 1))
    fair_share.prune(num_live=3)
    # One tenant per live request and 32 more stay. Dropped and new tenants start at the last dropped finish time.
    assert sorted(fair_share._last_finish.values()) == [10 * (i + 1) for i in range(165, 200)]
    assert [fair_share.enter(tenant, 1) for tenant in ((164).to_bytes(2), b"new", (199).to_bytes(2))] == [
        1650,
        1650,
        2000,
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=60))
def test_busy_tenants_differ_by_at_most_their_two_largest_requests(costs: list[tuple[int, int]]) -> None:
    """The bound of start-time fair queueing: in an interval in which two tenants always have requests waiting, their
    service differs by at most the sum of their largest requests."""
    fair_share = FairShare()
    queue = [(fair_share.enter(bytes([tenant]), cost), i, tenant, cost) for i, (tenant, cost) in enumerate(costs)]
    left = [sum(1 for tenant, _ in costs if tenant == one) for one in range(3)]
    got = [0, 0, 0]
    for start, _, tenant, cost in sorted(queue):
        fair_share.admitted(start)
        got[tenant] += cost
        left[tenant] -= 1
        busy = [one for one in range(3) if left[one]]
        for one in busy:
            assert abs(got[one] - got[busy[0]]) <= 18


@pytest.mark.parametrize("run", [True, False])
def test_tenants_without_requests_do_not_accumulate(world: World, run: bool) -> None:
    """Callers choose their salts, so each request may have a new one. It either runs or is cancelled while it waits."""
    world.audit_every = 16
    for _ in range(300):
        stream = ask(world, f"salt {len(world.streams)}", max_new_tokens=2)
        if run:
            world.run()
        else:
            world.cancel(stream)
    world.check_empty()
    assert len(world.core.queue.tenants[""].fair_share._last_finish) <= 64
