"""Tenants: one cannot delay or exclude another, with any salts; limits per minute, of the queue and of rows."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.operators import TenantLimits, TenantsChanged
from scheduler_svc.core.messages.page_hash import prefix_root
from scheduler_svc.core.queue.quotas import Bucket
from scheduler_svc.core.state.request import Phase
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.sent_plans import order
from tests.scheduler_svc.core.world import CACHE_ROOT, World, greedy

ONE_AT_A_TIME = Shape(max_rows=1, num_pages=16)


def ask(world: World, tenant: str = "acme", **options: Any) -> int:
    """Submits a prompt of two tokens that no other stream has."""
    number = len(world.streams) + 1
    options = {"max_new_tokens": 1, "ignore_eos": True, **options}
    return world.submit([number % 200, number // 200], tenant=tenant, **options)


def limit(world: World, **limits: Any) -> None:
    world.handle(TenantsChanged(limits={"acme": TenantLimits(**limits), "other": TenantLimits()}))


# Fair share -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt_per_request", [False, True])
def test_a_greedy_tenant_delays_another_by_one_request_whatever_its_salts(salt_per_request: bool) -> None:
    world = World(ONE_AT_A_TIME, greedy(max_waiting=200))
    greedy_ones = [ask(world, "greedy", salt=str(i) if salt_per_request else "") for i in range(100)]
    other = ask(world, "other")
    world.finish()
    assert order(world) == [greedy_ones[0], other, *greedy_ones[1:]]


def test_a_tenant_that_asks_for_more_tokens_than_it_uses_loses_nothing() -> None:
    """Both tenants make the same tokens, but one asks for a hundred times as many and stops early."""
    world = World(Shape(max_rows=1, num_pages=200, max_length=2000, token_budget=64), greedy(max_waiting=200))
    streams = {
        tenant: [ask(world, tenant, max_new_tokens=tokens) for _ in range(6)]
        for tenant, tokens in (("modest", 2), ("careful", 200))
    }
    while len(order(world)) < 8:
        world.step(0.001)
        for stream in streams["careful"]:
            if world.streams[stream].end is None and len(world.streams[stream].tokens) >= 2:
                world.cancel(stream)
    tenant_of = {stream: tenant for tenant, own in streams.items() for stream in own}
    began = [tenant_of[stream] for stream in order(world)]
    assert began.count("careful") >= 3


def test_a_parked_tenant_gets_no_credit() -> None:
    world = World(Shape(max_rows=2, num_pages=32), greedy(max_waiting=200))
    world.handle(TenantsChanged(limits={"capped": TenantLimits(row_share=0.5), "free": TenantLimits()}))
    capped = [ask(world, "capped", max_new_tokens=30) for _ in range(3)]
    free = [ask(world, "free", max_new_tokens=1) for _ in range(20)]
    world.finish()
    assert order(world)[0] == capped[0] and set(order(world)[1:15]) <= set(free)


def test_a_parked_tenant_is_considered_again_when_its_limits_change() -> None:
    """At once, not only when one of its requests ends."""
    world = World(Shape(max_rows=2, num_pages=32))
    limit(world, row_share=0.5)
    running, parked = (ask(world, max_new_tokens=40) for _ in range(2))
    world.steps(3)
    assert order(world) == [running]
    limit(world)
    world.steps(3)
    assert order(world) == [running, parked] and world.streams[running].end is None
    world.finish()


# Queue ----------------------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_queue_share_is_refused_and_another_is_admitted() -> None:
    world = World(ONE_AT_A_TIME, greedy(max_waiting=10))
    limit(world, queue_share=0.5)
    streams = [ask(world) for _ in range(8)]
    assert [number for number in streams if world.streams[number].rejected] == streams[5:]
    answer = world.refusal(streams[5])
    assert answer.code is fx.RejectCode.QUEUE_FULL
    assert answer.message == "5 requests of this tenant are waiting; its limit is 5 (queue_share 0.5)"
    assert world.streams[ask(world, "other")].admitted
    world.finish()
    assert world.core.queue.accounts.of("acme").waiting == world.core.queue.accounts.of("acme").waiting_tokens == 0


def test_a_tenant_at_its_share_of_waiting_tokens_is_refused() -> None:
    world = World(ONE_AT_A_TIME, greedy(max_waiting_tokens=12))
    limit(world, queue_share=0.5)
    streams = [ask(world) for _ in range(4)]
    assert world.refusal(streams[3]).message == (
        "6 tokens of this tenant are waiting and the request has 2; its limit is 6 (queue_share 0.5)"
    )


# Rows -----------------------------------------------------------------------------------------------------------------


def test_a_tenant_never_has_more_rows_than_its_share() -> None:
    world = World(Shape(max_rows=4, num_pages=64), greedy(max_waiting=200))
    limit(world, row_share=0.5)
    for _ in range(60):
        ask(world, max_new_tokens=3)
    late = [ask(world, "other", max_new_tokens=5) for _ in range(6)]
    most = {"acme": 0, "other": 0}
    for _ in range(400):
        world.step(0.01)
        for tenant in most:
            running = [one for one in world.core.queue if one.submit.tenant == tenant and one.phase is Phase.RUNNING]
            assert len(running) == len(world.core.queue.tenants[tenant].running)
            most[tenant] = max(most[tenant], len(running))
    world.check_all_ended()
    assert most["acme"] == 2 and most["other"] >= 2
    assert all(world.streams[number].end for number in late)


# Requests and tokens per minute ---------------------------------------------------------------------------------------


def test_requests_per_minute_refuses_and_says_when() -> None:
    world = World(Shape(max_rows=8, num_pages=64))
    limit(world, requests_per_minute=6)
    streams = [ask(world) for _ in range(7)]
    answer = world.refusal(streams[6])
    assert answer.code is fx.RejectCode.RATE_LIMITED and answer.retry_seconds == pytest.approx(10.0)
    assert answer.message.endswith("the limit of this tenant is 6 requests per minute (requests_per_minute)")
    assert world.streams[ask(world, "other")].admitted
    world.run()
    world.now += answer.retry_seconds
    assert world.streams[ask(world)].admitted
    assert world.refusal(ask(world)).code is fx.RejectCode.RATE_LIMITED


def test_tokens_are_reserved_at_admission_and_unused_ones_come_back() -> None:
    world = World(Shape(max_rows=8, num_pages=64))
    limit(world, tokens_per_minute=30)
    first = ask(world, max_new_tokens=20)
    assert world.refusal(ask(world, max_new_tokens=20)).code is fx.RejectCode.RATE_LIMITED
    world.cancel(first)
    # The prompt's 2 tokens stay charged, the 20 of the output are back: 28 are left.
    assert world.refusal(ask(world, max_new_tokens=27)).retry_seconds == pytest.approx(2.0)
    assert world.streams[ask(world, max_new_tokens=26)].admitted


@given(st.integers(1, 1000), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=40))
def test_a_bucket_never_gives_more_than_its_minute_and_rate(per_minute: int, asks: list[tuple[int, int]]) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for amount, seconds in asks:
        now += seconds
        wait = bucket.wait(amount, now)
        assert (wait == 0) == (bucket.wait(amount, now + wait) == wait) or bucket.wait(amount, now + wait) < 1e-6
        if not wait:
            bucket.take(amount, now)
            taken += amount
        # One request may be larger than the minute; its tenant then waits until the debt is paid.
        assert taken <= per_minute + per_minute * now / 60 + max(0, amount - per_minute if not wait else 500)


# Time in the queue ----------------------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_fails_and_one_that_runs_does_not() -> None:
    world = World(ONE_AT_A_TIME)
    running = ask(world, max_new_tokens=30, max_queue_seconds=1.0)
    world.step()
    waiting = ask(world, max_queue_seconds=1.0)
    world.tick(2.0)
    failure = world.failure(waiting)
    assert failure.code is fx.FailureCode.DEADLINE
    assert failure.message == (
        "request r2: it waited 2.000 s in the queue; the limit is 1 s (max_queue_seconds); "
        "it was waiting: other requests have the rows"
    )
    assert world.end_of(running) is None
    world.run()
    assert world.end(running).reason is fx.EndReason.LENGTH


# Isolation ------------------------------------------------------------------------------------------------------------


def test_no_page_is_found_across_tenants() -> None:
    """100,000 pairs of tenant and salt: equal roots only for equal pairs, also where the joined text is the same."""
    draw = random.Random(1)
    roots: dict[bytes, tuple[str, str]] = {}
    for _ in range(100_000):
        text = "".join(draw.choices("ab", k=draw.randint(1, 8)))
        cut = draw.randint(0, len(text))
        pair = text[:cut], text[cut:]
        assert roots.setdefault(prefix_root(CACHE_ROOT, pair[1], pair[0]), pair) == pair
