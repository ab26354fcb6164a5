"""The scheduler service and one worker, kept running side by side.

Owns both processes: their common flags, whether they serve, and the order in which they stop.
"""

import asyncio
import re
from collections.abc import Callable, Sequence

from tandem_client.async_client import AsyncClient
from tandem_client.errors import TandemError
from tandem_client.services.child import Child
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.supervisor import Failure, Supervisor

PROGRAMS = ("scheduler_svc", "gpu_worker")
_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
# What the service says of itself, at every log level.
_LISTENING = re.compile(r"\bfrontend listening on ([^\s\"]+)")
# The kernel kills both when this process ends, however it ends.
_WITH_PARENT = "--exit-with-parent"


class ServicePair:
    """Both processes. The worker stops last: streams that finish within the scheduler's grace need it."""

    def __init__(
        self,
        *,
        scheduler_flags: Sequence[str],
        worker_flags: Sequence[str],
        scheduler_policy: RestartPolicy,
        worker_policy: RestartPolicy,
        on_line: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._on_line = on_line
        # Where the running scheduler listens; what else answers at the address asked for is not ours.
        self._address = ""
        self._listening = asyncio.Event()
        # Set when a child ends.
        self._down = asyncio.Event()
        scheduler = Child("scheduler", PROGRAMS[0], [_WITH_PARENT, *scheduler_flags], on_line=self._on_child_line)
        worker = Child("worker", PROGRAMS[1], [_WITH_PARENT, *worker_flags], on_line=self._on_child_line)
        self.scheduler = Supervisor(scheduler, scheduler_policy, say=say, on_end=self._on_scheduler_end)
        self.worker = Supervisor(worker, worker_policy, say=say, on_end=self._down.set)
        self._supervising: list[asyncio.Task[Failure]] = []

    def start(self) -> None:
        """Starts both at once."""
        self._supervising = [asyncio.create_task(each.run()) for each in (self.scheduler, self.worker)]

    async def failed(self) -> Failure:
        """Returns once one of them is given up. To be called after `start`."""
        done, _ = await asyncio.wait(self._supervising, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def listening(self) -> str:
        """Returns the address once the scheduler listens there."""
        await self._listening.wait()
        return self._address

    async def ready(self) -> str:
        """Returns the address once the running scheduler serves there and the running worker serves it."""
        while True:
            address = await self.listening()
            async with AsyncClient(address, max_retries=0) as client:
                while self._address == address:
                    self._down.clear()
                    if await self._serves(client) and not self._down.is_set():
                        self.worker.mark_serving()
                        return address
                    await asyncio.sleep(_LOOK_SECONDS)

    async def down(self) -> None:
        """Returns once a child has ended since the pair was ready."""
        await self._down.wait()

    async def stop(self, grace_seconds: float) -> list[str]:
        """Stops both, each within the grace; one line for each that did not end in good order."""
        for task in self._supervising:
            task.cancel()
        await asyncio.gather(*self._supervising, return_exceptions=True)
        wrong: list[str] = []
        for child in (self.scheduler.child, self.worker.child):
            if child.running:
                status = await child.stop(grace_seconds)
                wrong += [f"the {child.name} ended with status {status}"] if status != 0 else []
        return wrong

    def kill(self) -> None:
        """Kills both at once, and the processes that they started."""
        for child in (self.scheduler.child, self.worker.child):
            if child.running:
                child.kill_group()

    async def _serves(self, client: AsyncClient) -> bool:
        """Whether the worker that runs now is one of those that the service serves with."""
        try:
            load = await client.load(timeout=_ANSWER_SECONDS)
            joined = self.worker.child.running and self.worker.child.pid in {worker.pid for worker in load.per_worker}
            return joined and await client.health(timeout=_ANSWER_SECONDS)
        except TandemError:
            return False

    def _on_child_line(self, name: str, line: str) -> None:
        self._on_line(name, line)
        if name == self.scheduler.child.name and (found := _LISTENING.search(line)) is not None:
            self._address = found[1]
            self._listening.set()
            self.scheduler.mark_serving()

    def _on_scheduler_end(self) -> None:
        self._address = ""
        self._listening.clear()
        self._down.set()
