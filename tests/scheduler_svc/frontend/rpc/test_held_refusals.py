"""How fast a tenant is refused: a burst at once, then each refusal is held; other tenants are not affected."""

import asyncio

import pytest

from scheduler_svc.frontend.rpc import held_refusals, status
from scheduler_svc.frontend.rpc.held_refusals import BURST, HeldRefusals
from tests.scheduler_svc.frontend.rpc.test_read_slots import in_loop, settle

FULL = status.overloaded("the queue is full", 0.05)


async def refuse(held: HeldRefusals, tenant: str | None, count: int, refusal: status.Refusal = FULL) -> int:
    """Refuses `count` calls at once. Returns how many are held; they are cancelled."""
    tasks = [asyncio.create_task(held.hold(tenant, refusal)) for _ in range(count)]
    await settle()
    num_held = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return num_held


def test_beyond_a_burst_the_refusals_of_a_tenant_are_held() -> None:
    async def scenario() -> None:
        held = HeldRefusals(is_shared=True)
        assert await refuse(held, "greedy", BURST) == 0
        assert await refuse(held, "greedy", 7) == 7
        assert await refuse(held, "polite", BURST) == 0

    in_loop(scenario)


def test_a_held_refusal_ends_after_a_part_of_the_time_of_its_hint() -> None:
    async def scenario() -> None:
        held = HeldRefusals(is_shared=True)
        await refuse(held, "greedy", BURST)
        begun = asyncio.get_running_loop().time()
        await held.hold("greedy", FULL)
        assert asyncio.get_running_loop().time() - begun >= 0.025

    in_loop(scenario)


def test_after_a_pause_the_burst_is_whole_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(held_refusals, "PER_SECOND", 4000)
        held = HeldRefusals(is_shared=True)
        await refuse(held, "greedy", 2 * BURST)
        await asyncio.sleep(2 * BURST / 4000)
        assert await refuse(held, "greedy", BURST // 2) == 0

    in_loop(scenario)


def test_held_calls_are_bounded_and_tenants_share_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(held_refusals, "MAX_HELD", 8)
        held = HeldRefusals(is_shared=True)
        await refuse(held, "greedy", BURST)
        # Half of the places; the others are refused at once. Callers that leave give theirs back.
        for _ in range(3):
            assert await refuse(held, "greedy", 20) == 4

    in_loop(scenario)


@pytest.mark.parametrize(
    ("is_shared", "tenant", "refusal"),
    [
        (False, "", FULL),
        (True, None, FULL),
        (True, "greedy", status.not_ready("no worker")),
        (True, "greedy", status.invalid("field", "message")),
    ],
)
def test_nothing_else_is_held(is_shared: bool, tenant: str | None, refusal: status.Refusal) -> None:
    async def scenario() -> None:
        assert await refuse(HeldRefusals(is_shared=is_shared), tenant, 2 * BURST, refusal) == 0

    in_loop(scenario)
