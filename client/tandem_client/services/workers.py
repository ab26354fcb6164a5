"""The workers of one service: the first one serves, the others are on standby and start after it.

Owns their processes, names and flags. A worker that ends is started again; if there are standby workers, as one of
them, because one of the others serves by then. The worker itself keeps the CPU priority of a standby's start low.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

from tandem_client.services.programs import OPTIONAL, OnLine, kept
from tandem_client.types import Load, WorkerState
from tandem_contract.child import Program, python
from tandem_contract.processes import Heard, Policy, Supervisor

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
        policy: Policy,
        on_line: OnLine,
        on_end: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`worker_flags` are for every worker. `on_end` is called at each end of a worker."""
        self._module, self._flags = module, list(worker_flags)
        self._standbys = standbys
        self._on_line = on_line
        # Pages of the serving worker's pool, so that standby workers have as many; 0 before one served.
        self._num_pages = 0
        self._may_start_standbys = False
        names = [f"worker {number}" for number in range(1, standbys + 2)] if standbys else ["worker"]
        self.all: list[Supervisor] = []
        for number, name in enumerate(names):
            program, hear = partial(self._program, number), partial(self._hear, name)
            self.all.append(kept(name, program, OPTIONAL if number else policy, hear=hear, say=say, on_end=on_end))

    @property
    def first(self) -> Supervisor:
        """The worker that serves first."""
        return self.all[0]

    def note(self, load: Load) -> bool:
        """Takes note of the service's load. Returns whether one of these workers serves."""
        serves = False
        for each in self.all:
            for worker in load.per_worker:
                if not each.pid or worker.pid != each.pid or worker.state not in _READY:
                    continue
                each.mark_serving()
                if not worker.is_standby:
                    serves, self._num_pages = True, worker.pages_total + 1
        return serves

    def assume_serving(self) -> bool:
        """Takes the first worker for the one that serves, where only the service's health is known."""
        self.first.mark_serving()
        return self.first.pid != 0

    def may_start_standbys(self) -> None:
        """Lets standby workers start, because the service is ready."""
        if not self._may_start_standbys:
            self._may_start_standbys = True
            for each in self.all[1:]:
                each.hurry()

    def _program(self, number: int) -> Program | None:
        if number and not self._may_start_standbys:
            return None
        own: list[str] = []
        if self._standbys and not number and not self.first.num_starts:
            own = [f"--standbys={self._standbys}"]
        elif self._standbys:
            own = ["--standby", *([f"--standby-pages={self._num_pages}"] if self._num_pages else [])]
        return Program(argv=python(self._module, *self._flags, *own))

    def _hear(self, name: str, line: str) -> Heard:
        self._on_line(name, line)
        return Heard.SERVES if _ON_STANDBY.search(line) is not None else Heard.WORDS
