"""New requests pass one by one, so that other work of the event loop runs between them."""

import asyncio
import itertools

from scheduler_svc.frontend.rpc.turns import Turns


class Requests:
    """Tasks that wait for their turn and note that they passed."""

    def __init__(self, count: int) -> None:
        self.turns = Turns()
        self.passed: list[int] = []
        self.tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        await self.turns.wait()
        self.passed.append(number)


def test_one_task_passes_in_each_turn_of_the_loop_in_order():
    async def test() -> None:
        requests, num_passed = Requests(5), [0]
        while num_passed[-1] < 5:
            await asyncio.sleep(0)
            num_passed.append(len(requests.passed))
        assert requests.passed == [0, 1, 2, 3, 4]
        assert all(after - before <= 1 for before, after in itertools.pairwise(num_passed))

    asyncio.run(test())


def test_a_cancelled_task_gives_up_its_turn():
    async def test() -> None:
        requests = Requests(4)
        await asyncio.sleep(0)
        requests.tasks[1].cancel()
        requests.tasks[2].cancel()
        await asyncio.gather(*requests.tasks, return_exceptions=True)
        assert requests.passed == [0, 3]
        # The next turn is free again.
        await requests.turns.wait()

    asyncio.run(test())
