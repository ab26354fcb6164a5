"""Keeps the scheduler service and its workers running side by side.

Owns their flags, whether they are ready, and the order in which they start and stop. The first worker serves, the
others are on standby and start after it. A worker that ends is started again; if there are standby workers, as one of
them, because one of the others serves by then. The worker itself keeps the CPU priority of a standby's start low.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tandem_client.errors import TandemError
from tandem_client.services.gateway import Gateway, asks_for_proofs, health_flags
from tandem_client.services.programs import OPTIONAL, PROGRAMS, READY, RESTARTED, SCHEDULER, OnEnd, OnLine
from tandem_client.services.settings import Settings
from tandem_client.types import Load, ModelInfo, WaitReason, WorkerState
from tandem_contract.child import Program, python
from tandem_contract.logs import parse
from tandem_contract.processes import Heard, Policy, Supervisor, run_async
from tandem_contract.stopping import is_stop

if TYPE_CHECKING:
    from tandem_client.services.probe import Probe

# The name that a worker gives the bundled model.
_NAME = "bundled"
TOY_NOTICE = "the bundled model is a toy of 4 million parameters: what it writes is babble; name another model"

# The states of a worker that has what it needs; UNKNOWN is that of a service that reports none.
_READY = (WorkerState.SERVING, WorkerState.STANDBY, WorkerState.UNKNOWN)
# A line of a standby worker, which it prints at every log level.
_ON_STANDBY = re.compile(r"\bon standby: ready to take over")

_HOLDER = "gpu_worker.holder"
_LOOK_SECONDS = 0.1
# How often a service that was ready is asked whether it still is. After how long the user is warned, and then
# how often at most.
_WATCH_SECONDS, _TELL_SECONDS = 1.0, 1.0
# They do not count as news before the service was ready.
_AT_START = (WaitReason.NO_WORKER, WaitReason.WORKER_STARTING, WaitReason.UNKNOWN)
_ANSWER_SECONDS = 5.0
# How long a drain of the scheduler takes at most, as it says at the begin; and what a program may need after it.
_DRAIN = re.compile(r"\bstopping: .* ha(?:s|ve) at most (\S+) s to end")
_SPARE_SECONDS = 15.0
# A line of the service, which it prints at every log level.
_LISTENING = re.compile(r"\bfrontend listening on ([^\s\"]+)")
# The line before it, with --health-listen.
_HEALTH = re.compile(r"\bhealth listening on ([^\s\"]+)")
# The line comes with the first worker, before the service is healthy.
_COMMAND_SECONDS = 2.0
# It starts when the scheduler listens.
_GATEWAY_SECONDS = 10.0
# The time to ask for suspects during the pause before a restart.
_URGENT_SECONDS = 1.0
# The time of the scheduler to end its streams when no caller waits for their requests.
_NOW_SECONDS = 0.9
# The kernel kills all processes when this process ends, for any reason.
_WITH_PARENT = "--exit-with-parent"

_Result = TypeVar("_Result")


def probe(address: str) -> "Probe":
    """A client of the scheduler at this address. The first one imports gRPC, while the programs start."""
    from tandem_client.services.probe import Probe

    return Probe(address)


def is_toy(info: ModelInfo) -> bool:
    return info.model == _NAME


class Workers:
    """`1 + standbys` workers. Standby workers never end the service: they are tried again with growing pauses."""

    def __init__(
        self,
        worker_flags: Sequence[str],
        *,
        standbys: int,
        policy: Policy,
        on_line: OnLine,
        on_end: OnEnd,
    ) -> None:
        self._flags = list(worker_flags)
        self._standbys = standbys
        self._on_line = on_line
        # Pages of the serving worker's pool, so that standby workers have as many; 0 before one served.
        self._num_pages = 0
        self._may_start_standbys = False
        names = [f"worker {number}" for number in range(1, standbys + 2)] if standbys else ["worker"]
        self.all: list[Supervisor] = []
        for number, name in enumerate(names):
            program, hear = partial(self._program, number), partial(self._hear, name)
            self.all.append(Supervisor(name, program, OPTIONAL if number else policy, hear=hear, on_end=on_end))

    def note(self, load: Load) -> bool:
        """Takes note of the service's load. Returns whether one of these workers serves."""
        serves = False
        for process in self.all:
            for worker in load.per_worker:
                if not process.pid or worker.pid != process.pid or worker.state not in _READY:
                    continue
                process.mark_serving()
                if not worker.is_standby:
                    serves, self._num_pages = True, worker.pages_total + 1
        return serves

    def assume_serving(self) -> bool:
        """Takes the first worker for the one that serves, where only the service's health is known."""
        self.all[0].mark_serving()
        return self.all[0].pid != 0

    def may_start_standbys(self) -> None:
        """Lets standby workers start, because the service is ready."""
        if not self._may_start_standbys:
            self._may_start_standbys = True
            for process in self.all[1:]:
                process.hurry()

    def _program(self, number: int) -> Program | None:
        if number and not self._may_start_standbys:
            return None
        flags_of_place: list[str] = []
        if self._standbys and not number and not self.all[0].num_starts:
            flags_of_place = [f"--standbys={self._standbys}"]
        elif self._standbys:
            flags_of_place = ["--standby", *([f"--standby-pages={self._num_pages}"] if self._num_pages else [])]
        return Program(argv=python(PROGRAMS[1], *self._flags, *flags_of_place))

    def _hear(self, name: str, line: str) -> Heard:
        self._on_line(name, line)
        return Heard.SERVES if _ON_STANDBY.search(line) is not None else Heard.WORDS


class ServicePair:
    """All processes. Workers stop last, because streams that finish within the scheduler's grace need them."""

    def __init__(
        self,
        *,
        scheduler_flags: Sequence[str],
        worker_flags: Sequence[str],
        scheduler_policy: Policy = SCHEDULER,
        worker_policy: Policy = RESTARTED,
        standbys: int = 0,
        holder_flags: Sequence[str] | None = None,
        gateway_flags: Sequence[str] | None = None,
        settings: Settings,
        on_line: OnLine,
        on_end: OnEnd,
        say: Callable[[str], None],
    ) -> None:
        """`standbys`: workers that wait, warm, until the serving one ends.

        `holder_flags`: of the process that keeps the KV pools of dead workers (gpu_worker/holder); None starts none.
        `gateway_flags`: of the HTTP gateway; None starts none. `settings`: what the scheduler reads of its flags.
        """
        self._on_line, self._on_end, self._say = on_line, on_end, say
        # Whether it was ready; since when it is not, on the loop's clock; what was printed last, and when.
        self._was_ready = False
        self._idle_since: float | None = None  # on the loop's clock
        self._told, self._told_at = "", 0.0
        self._has_door = asks_for_proofs(settings)
        # Where the health of a scheduler is asked that wants TLS or tokens.
        self._probe = ""
        # The address of the running scheduler. Another service may answer at the address of the flags.
        self._address = ""
        self._listening, self._commanded = asyncio.Event(), asyncio.Event()
        # The scheduler's own command, with the flags that callers need.
        self._command = ""
        # Set when a child ends.
        self._down = asyncio.Event()
        scheduler = Program(argv=python(PROGRAMS[0], _WITH_PARENT, *scheduler_flags, *health_flags(settings)))
        self.scheduler = Supervisor(
            "scheduler", lambda: scheduler, scheduler_policy,
            hear=self._hear_scheduler, on_end=self._ended,
        )  # fmt: skip
        self._workers = Workers(
            [_WITH_PARENT, *worker_flags], standbys=standbys, policy=worker_policy, on_line=on_line,
            on_end=self._ended,
        )  # fmt: skip
        # The worker that serves first.
        self.worker = self._workers.all[0]
        self._holders: list[Supervisor] = []
        if holder_flags is not None:
            holder = Program(argv=python(_HOLDER, _WITH_PARENT, *holder_flags))
            # Without a holder workers compute lost pages again.
            self._holders = [Supervisor("holder", lambda: holder, OPTIONAL, hear=self._hear_holder, on_end=on_end)]
        # What callers reach.
        self._services, self._gateway = [self.scheduler], None
        if gateway_flags is not None:
            self._gateway = Gateway([_WITH_PARENT, *gateway_flags], settings, on_line=on_line, on_end=on_end)
            self._services.append(self._gateway.process)
        self._stops_within, self._drains_within = math.inf, 0.0
        self._supervising: dict[Supervisor, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Starts the scheduler and the first worker at the same time, standby workers when these are ready."""
        # The holder is the first, so that a worker finds it.
        for process in (*self._holders, *self._services):
            self._supervising[process] = asyncio.create_task(run_async(process))
        for process in self._workers.all:
            self._supervising[process] = asyncio.create_task(run_async(process, self._has_suspects))

    async def guard(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Does the work while all processes run. Raises ServiceEnded, and cancels the work, if one of them ends."""
        working = asyncio.create_task(work)
        try:
            await asyncio.wait([working, *self._supervising.values()], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            working.cancel()
        await asyncio.wait([working])
        ended = next(task.exception() for task in self._supervising.values() if task.done())
        assert ended is not None, "a process ends for good by a failure"
        raise ended

    async def listening(self) -> str:
        """Waits until the scheduler listens; returns its address."""
        await self._listening.wait()
        return self._address

    async def ready(self) -> str:
        """Waits until the running scheduler computes with a running worker; returns its address. Prints its waits."""
        while True:
            address = await self.listening()
            async with probe(self._probe or address) as client:
                while self._address == address:
                    self._down.clear()
                    if await self._serves(client) and not self._down.is_set():
                        self._workers.may_start_standbys()
                        self._was_ready, self._idle_since, self._told = True, None, ""
                        return address
                    await asyncio.sleep(_LOOK_SECONDS)

    async def command(self) -> str:
        """Returns the command that tries a scheduler with TLS or tokens; empty if the address is all that it needs."""
        if self._has_door and not self._command:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._commanded.wait(), _COMMAND_SECONDS)
        return self._command

    async def url(self) -> str:
        """Waits a moment until the gateway listens; returns its URL, or an empty text without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GATEWAY_SECONDS):
                while self._gateway is not None and not self._gateway.url:
                    await asyncio.sleep(_LOOK_SECONDS)
        return "" if self._gateway is None else self._gateway.url

    async def down(self) -> None:
        """Waits until a child has ended since the pair was ready, or the service reported that it computes no more."""
        async with probe(self._probe or self._address) as client:
            while not self._down.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._down.wait(), _WATCH_SECONDS)
                    return
                if await self._serves(client) is False and (self._told or self._probe):
                    return

    async def stop(self, grace_seconds: float) -> list[str]:
        """Stops all, each within the grace; returns a line for each that did not end with status 0.

        The programs that callers reach have more if the scheduler's own grace is longer.
        """
        self._stops_within = max(grace_seconds, self._drains_within)
        for process in self._supervising:
            process.start_no_more()
        wrong: list[str] = []
        for group in (self._services, self._workers.all, self._holders):
            running = [process for process in group if process.pid]
            for process in group:
                process.stop(self._stops_within if group is self._services else grace_seconds)
            tasks = [self._supervising[process] for process in group if process in self._supervising]
            await asyncio.gather(*tasks, return_exceptions=True)
            ended = [process.ended for process in running if process.ended is not None]
            # During its start a program is ended by the order itself.
            wrong += [f"the {one.name} {one.how}" for one in ended if one.status and not is_stop(one.status)]
        return wrong

    def stop_now(self) -> None:
        """Lets the programs that callers reach end all streams now; kills what is left after a moment."""
        for process in self._services:
            process.stop_now()
        asyncio.get_running_loop().call_later(_NOW_SECONDS, self.kill)

    def kill(self) -> None:
        """Kills all processes and those that they started."""
        for process in self._supervising:
            process.kill()

    async def _serves(self, client: "Probe") -> bool | None:
        """Whether the service is ready and a running worker serves it; None if it does not answer."""
        try:
            if self._probe:
                return await client.health(timeout=_ANSWER_SECONDS) and self._workers.assume_serving()
            load = await client.load(timeout=_ANSWER_SECONDS)
            self._note_reason(load)
            return self._workers.note(load) and not load.not_serving and await client.health(timeout=_ANSWER_SECONDS)
        except TandemError:
            return None

    def _note_reason(self, load: Load) -> None:
        """Prints why no request is computed, when that has lasted for a moment."""
        now, why = asyncio.get_running_loop().time(), load.not_serving
        if not why or (not self._was_ready and load.not_serving_reason in _AT_START):
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
        if why != self._told and now - max(self._idle_since, self._told_at) >= _TELL_SECONDS:
            self._told, self._told_at = why, now
            self._say(f"not serving: {why}")

    async def _has_suspects(self) -> bool:
        """Whether the core looks for the request that kills workers, so that a worker is needed at once."""
        if not self._address or self._probe:
            return False
        try:
            async with probe(self._address) as client:
                return bool((await client.load(timeout=_URGENT_SECONDS)).suspects)
        except TandemError:
            return False

    def _hear_holder(self, line: str) -> Heard:
        self._on_line("holder", line)
        return Heard.WORDS

    def _hear_scheduler(self, line: str) -> Heard:
        self._on_line(self.scheduler.name, line)
        if self._has_door and (probe := _HEALTH.search(line)) is not None:
            self._probe = probe[1]
        if self._has_door and (command := READY.search(parse(line).message)) is not None:
            self._command = command[1]
            self._commanded.set()
        if (drain := _DRAIN.search(line)) is not None:
            # The scheduler says it when it begins to stop, before or after it was asked to.
            self._drains_within = seconds = float(drain[1]) + _SPARE_SECONDS
            if seconds > self._stops_within:
                self._stops_within = seconds
                for process in self._services:
                    process.stop(seconds)
        if (listening := _LISTENING.search(line)) is None:
            return Heard.WORDS
        self._address = listening[1]
        if self._gateway is not None:
            self._gateway.follow(self._address, self._probe)
        self._listening.set()
        return Heard.SERVES

    def _ended(self, process: Supervisor) -> None:
        if process is self.scheduler:
            self._address = ""
            self._listening.clear()
        self._down.set()
        self._on_end(process)
