"""The workers of one service: the first one serves, the others are on standby and start after it.

Owns their processes, names and flags. A worker that ends is started again; if there are standby workers, as one of
them, because one of the others serves by then. The worker itself keeps the CPU priority of a standby's start low.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NoReturn

from tandem_client.services.child import Child, OnLine
from tandem_client.services.restarts import RestartPolicy
from tandem_client.services.supervisor import Supervisor
from tandem_client.types import Load, WorkerState

# The states of a worker that has what it needs; UNKNOWN is that of a service which tells none.
_READY = (WorkerState.SERVING, WorkerState.STANDBY, WorkerState.UNKNOWN)
# A line of a standby worker, which it prints at every log level.
_ON_STANDBY = re.compile(r"\bon standby: ready to take over")


class Workers:
    """`1 + standbys` workers. Standby workers never end the service: they are tried again with growing pauses."""

    def __init__(
        self,
        module: str,
        worker_flags: Sequence[str],
        *,
        standbys: int,
        policy: RestartPolicy,
        on_line: OnLine,
        on_end: Callable[[], None],
        say: Callable[[str], None],
        is_urgent: Callable[[], Awaitable[bool]],
    ) -> None:
        """`worker_flags` are for every worker. `on_end` is called at each end of a worker."""
        self._flags = list(worker_flags)
        self._standbys = standbys
        self._on_line = on_line
        # Pages of the serving worker's pool, so that standby workers have as many; 0 before one served.
        self._num_pages = 0
        self._served = asyncio.Event()
        own = [f"--standbys={standbys}"] if standbys else []
        names = [f"worker {number}" for number in range(1, standbys + 2)] if standbys else ["worker"]
        self._supervisors: list[Supervisor] = []
        for number, name in enumerate(names):
            child = Child(name, module, [*self._flags, *([] if number else own)], on_line=self._on_child_line)
            its_policy = RestartPolicy(needs_service=False, max_ends=None) if number else policy
            ended = self._ended(child, on_end)
            self._supervisors.append(Supervisor(child, its_policy, say=say, on_end=ended, is_urgent=is_urgent))

    @property
    def first(self) -> Supervisor:
        """The worker that serves first."""
        return self._supervisors[0]

    @property
    def children(self) -> list[Child]:
        """All workers, also those that do not run."""
        return [each.child for each in self._supervisors]

    def start(self) -> Iterator[asyncio.Task[NoReturn]]:
        """Starts the first worker, and the others once `note` has seen a worker that serves."""
        yield asyncio.create_task(self.first.run())
        for each in self._supervisors[1:]:
            yield asyncio.create_task(self._run_standby(each))

    def note(self, load: Load) -> bool:
        """Takes note of the service's load. Returns whether one of these workers serves."""
        serves = False
        for each in self._supervisors:
            found = [worker for worker in load.per_worker if each.child.running and worker.pid == each.child.pid]
            for worker in found:
                if worker.state not in _READY:
                    continue
                each.mark_serving()
                if not worker.is_standby:
                    serves, self._num_pages = True, worker.pages_total + 1
        return serves

    def assume_serving(self) -> bool:
        """Takes the first worker for the one that serves, where only the service's health is known."""
        if self.first.child.running:
            self.first.mark_serving()
        return self.first.child.running

    def may_start_standbys(self) -> None:
        """Lets standby workers start, because the service is ready."""
        self._served.set()

    async def _run_standby(self, supervisor: Supervisor) -> NoReturn:
        await self._served.wait()
        supervisor.child.arguments = self._standby_flags()
        return await supervisor.run()

    def _standby_flags(self) -> list[str]:
        pages = [f"--standby-pages={self._num_pages}"] if self._num_pages else []
        return [*self._flags, "--standby", *pages]

    def _ended(self, child: Child, on_end: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            if self._standbys:
                child.arguments = self._standby_flags()
            on_end()

        return ended

    def _on_child_line(self, name: str, line: str) -> None:
        self._on_line(name, line)
        if _ON_STANDBY.search(line) is not None:
            for each in self._supervisors:
                if each.child.name == name:
                    each.mark_serving()
