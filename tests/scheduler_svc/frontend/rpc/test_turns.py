"""New requests pass one by one, tenants round robin, so that other work of the event loop runs between them."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler_svc.frontend import methods
from scheduler_svc.frontend.rpc.gate import Bound, Gate
from scheduler_svc.frontend.rpc.status import Refusal


class Requests:
    """Tasks that wait for their turn and note that they passed, each of the tenant at its place in `tenants`."""

    def __init__(self, tenants: Sequence[str]) -> None:
        self.turns = Gate(Bound(most=1), methods.WAITING, lasts_a_turn=True)
        self.passed: list[int] = []
        self.tasks = [asyncio.create_task(self._run(number, tenant)) for number, tenant in enumerate(tenants)]

    async def _run(self, number: int, tenant: str) -> None:
        await self.turns.enter(tenant, 100)
        self.passed.append(number)


def test_one_task_passes_in_each_turn_of_the_loop_in_order() -> None:
    async def test() -> None:
        requests, num_passed = Requests([""] * 5), [0]
        while num_passed[-1] < 5:
            await asyncio.sleep(0)
            num_passed.append(len(requests.passed))
        assert requests.passed == [0, 1, 2, 3, 4]
        assert all(after - before <= 1 for before, after in itertools.pairwise(num_passed))

    asyncio.run(test())


def test_tenants_pass_round_robin() -> None:
    async def test() -> None:
        requests = Requests("aaaaaabbc")
        await asyncio.gather(*requests.tasks)
        # The first passes at once.
        assert requests.passed == [0, 1, 6, 8, 2, 7, 3, 4, 5]

    asyncio.run(test())


def test_a_cancelled_task_gives_up_its_turn() -> None:
    async def test() -> None:
        requests = Requests([""] * 4)
        await asyncio.sleep(0)
        requests.tasks[1].cancel()
        requests.tasks[2].cancel()
        await asyncio.gather(*requests.tasks, return_exceptions=True)
        assert requests.passed == [0, 3]
        # The next turn is free again.
        await requests.turns.enter("", 100)

    asyncio.run(test())


def test_waiting_bytes_are_bounded_and_one_tenant_leaves_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "WAITING", replace(methods.WAITING, most=1000))

    async def test() -> None:
        # One passes at once; five wait, and as much is free as they hold; the next two are refused.
        greedy = Requests("a" * 8)
        await asyncio.sleep(0)
        other = asyncio.create_task(greedy.turns.enter("b", 100))
        results = await asyncio.gather(*greedy.tasks, return_exceptions=True)
        refused = [each.message for each in results if isinstance(each, Refusal)]
        assert len(refused) == 2
        assert (
            "500 bytes of the caller's requests wait to be parsed and this one adds 100; the limit is 500" in refused[0]
        )
        await other
        assert len(greedy.passed) == 6

    asyncio.run(test())
