"""Which grammar is tried next, for whom, and the answers of earlier trials. Owns the process that tries them.

One grammar is tried at a time. The tenant that has used the least time of the process goes first (start-time fair
queueing, as in `text/fair_threads`), so a tenant with slow grammars delays another's by one of its own at most. Equal
grammars share one trial, and a result is kept by the grammar's hash. The other side of the process is
`scheduler_svc/constraint_trial`.
"""

import asyncio
import os
import signal
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scheduler_svc.constraint_trial import HELLO, MAX_PACKET, packed, unpacked
from scheduler_svc.frontend.rpc import status
from tandem_contract.fork_server import ForkServer, cpu_seconds
from tandem_contract.grammars import COMPILE_SECONDS, START_SECONDS, limit_words
from tandem_contract.needed import needed_task
from tandem_contract.plural import numbered

# Wall time after which nothing is known about the grammar, because the machine is busy.
PATIENCE_SECONDS = 10.0
# Between two looks at the CPU clock.
_SLICE_SECONDS = 0.05
# One death may be another's doing, such as the kernel's when memory is short.
MAX_DEATHS = 2
MAX_KEPT = 1_024
# Of one tenant.
MAX_WAITING = 8


class TrialUnusable(Exception):
    """No process can try grammars for this model; the text says why."""


class _Died(Exception):
    """The process that tries grammars has ended without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a trial."""

    # Why the grammar is refused, in one sentence; empty if it is not.
    refusal: str = ""
    # Whether the process had to be killed.
    was_killed: bool = False
    # Whether the machine was too busy to judge the grammar.
    is_unknown: bool = False


class TrialProcess:
    """One at a time; no process starts before the first trial. Not for several trials at once."""

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        cpu_seconds: float = COMPILE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`cpu_seconds` and `patience_seconds` are the limits of a trial."""
        self._cpu_limit, self._patience, self.slowness = cpu_seconds, patience_seconds, 1.0
        self._forks = ForkServer(
            "scheduler_svc.constraint_trial",
            {"vocab_size": vocab_size, "eos": list(eos_token_ids)},
            files={"tokenizer": tokenizer_json},
        )
        self._connection: socket.socket | None = None
        self._child = self._number = 0

    async def judge(self, grammar: str) -> Verdict:
        """Tries a grammar, again if the process dies. Raises TrialUnusable."""
        for _ in range(MAX_DEATHS):
            if self._connection is None:
                await self._begin()
            try:
                return await self._judge(grammar)
            except _Died:
                self._leave_child()
        why = f"its trial ended the process that tries it, {MAX_DEATHS} times, perhaps out of memory"
        return Verdict(refusal=why, was_killed=True)

    async def _judge(self, grammar: str) -> Verdict:
        assert self._connection is not None
        self._number += 1
        cpu_before = cpu_seconds(self._child)
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, packed(self._number, grammar))
            verdict, packet = await self._wait(self._connection, cpu_before)
        except OSError:
            raise _Died from None
        except BaseException:
            # The caller has gone; the child still computes.
            self._kill_child()
            raise
        if verdict is not None:
            self._kill_child()
            return verdict
        if not packet:
            raise _Died
        number, refusal = unpacked(packet)
        assert number == self._number, f"answer {number} came where {self._number} was due"
        return Verdict(refusal=refusal)

    def close(self) -> None:
        """Ends the process."""
        self._leave_child()
        self._forks.kill()

    async def _wait(self, connection: socket.socket, cpu_before: float) -> tuple[Verdict | None, bytes]:
        """Returns the child's answer, or the verdict if it takes too long."""
        loop = asyncio.get_running_loop()
        answer = asyncio.ensure_future(loop.sock_recv(connection, MAX_PACKET))
        begun = loop.time()
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=_SLICE_SECONDS)
                if answer.done():
                    break
                used = cpu_seconds(self._child) - cpu_before
                if used > self._cpu_limit * self.slowness:
                    words = limit_words(self._cpu_limit, self.slowness)
                    return Verdict(refusal=f"its trial took {used:.3g} s of CPU time; {words}", was_killed=True), b""
                if (waited := loop.time() - begun) > self._patience:
                    got = f"its trial got {used:.2g} s of CPU time in {waited:.0f} s, because the machine is busy"
                    words = limit_words(self._cpu_limit, self.slowness)
                    return Verdict(refusal=f"{got}; {words}", was_killed=True, is_unknown=True), b""
            return None, answer.result()
        finally:
            # The loop must have let go of the socket before it is closed.
            answer.cancel()
            await asyncio.wait([answer])
            if not answer.cancelled():
                answer.exception()

    async def _begin(self) -> None:
        """Starts the process, if there is none, and a child that serves. Raises TrialUnusable."""
        for _ in range(MAX_DEATHS):
            try:
                packet = await self._fork()
                words = "" if packet else self._forks.last_words()
            except OSError as error:
                self.close()
                raise TrialUnusable(f"{type(error).__name__}: {error}") from None
            if packet:
                number, text = unpacked(packet)
                assert number == HELLO, "a child says its process id first"
                process, slowness = text.split()
                self._child, self.slowness = int(process), float(slowness)
                return
            self.close()
            if words:
                raise TrialUnusable(words)
        raise TrialUnusable("its process has ended")

    async def _fork(self) -> bytes:
        """The first packet of a new child; empty if it has ended."""
        self._connection = self._forks.fork()
        with suppress(ConnectionError):
            async with asyncio.timeout(START_SECONDS):
                return await asyncio.get_running_loop().sock_recv(self._connection, MAX_PACKET)
        return b""

    def _kill_child(self) -> None:
        """Kills the child, which has just been seen alive. The process that forked it may wait long for its turn."""
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
        self._leave_child()

    def _leave_child(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._child = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """A grammar that waits or is tried."""

    name: bytes
    grammar: str
    tenant: str
    done: "asyncio.Future[Verdict]"
    # Callers that wait for it.
    num_callers: int = 0


class Trials:
    """The trials for one model."""

    def __init__(self, process: TrialProcess, *, clock: Callable[[], float], on_end: Callable[[Verdict], None]) -> None:
        """`clock` returns seconds that never go back. `on_end` gets the verdict of each trial."""
        self._process = process
        self._clock, self._on_end = clock, on_end
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._by_name: dict[bytes, _Entry] = {}
        # In order of arrival, by tenant.
        self._waiting: dict[str, deque[_Entry]] = {}
        # Seconds of the process that each tenant has used, counted from the time that all had used the same.
        self._used: dict[str, float] = {}
        self._least = 0.0
        self._task: asyncio.Task[object] | None = None

    async def judge(self, name: bytes, grammar: str, tenant: str) -> Verdict:
        """Returns the verdict on a grammar, whose hash is `name`. Raises Refusal if too many of the tenant wait."""
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        entry = self._by_name.get(name) or self._enqueue(name, grammar, tenant)
        entry.num_callers += 1
        try:
            return await asyncio.shield(entry.done)
        finally:
            entry.num_callers -= 1

    def close(self) -> None:
        """Ends the process; what waits is refused."""
        if self._task is not None:
            self._task.cancel()
        for entry in self._by_name.values():
            if not entry.done.done():
                entry.done.set_exception(status.not_ready("the model is not served any more"))
                # Its callers may all have gone.
                entry.done.exception()
        self._process.close()

    def _enqueue(self, name: bytes, grammar: str, tenant: str) -> _Entry:
        waiting = self._waiting.get(tenant, ())
        if len(waiting) >= MAX_WAITING:
            what = (
                f"{numbered(len(waiting), 'new constraint of the caller', 'wait')} "
                f"for their trial; the limit is {MAX_WAITING}"
            )
            raise status.overloaded(what, COMPILE_SECONDS)
        done: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        entry = self._by_name[name] = _Entry(name=name, grammar=grammar, tenant=tenant, done=done)
        if tenant not in self._waiting:
            self._used[tenant] = max(self._used.get(tenant, 0.0), self._least)
        self._waiting.setdefault(tenant, deque()).append(entry)
        if self._task is None or self._task.done():
            self._task = needed_task(self._serve(), "trials")
        return entry

    def _next(self) -> _Entry | None:
        while self._waiting:
            tenant = min(self._waiting, key=lambda each: self._used[each])
            of_tenant = self._waiting[tenant]
            entry = of_tenant.popleft()
            if not of_tenant:
                del self._waiting[tenant]
            if entry.num_callers:
                self._least = max(self._least, self._used[tenant])
                return entry
            del self._by_name[entry.name]
        return None

    async def _serve(self) -> None:
        """Tries grammars until none waits."""
        while (entry := self._next()) is not None:
            begun = self._clock()
            try:
                verdict = await self._process.judge(entry.grammar)
            except TrialUnusable as reason:
                verdict = Verdict(refusal=f"constraints cannot be tried: {reason}", is_unknown=True)
            self._used[entry.tenant] += self._clock() - begun
            self._on_end(verdict)
            if not verdict.is_unknown:
                self._kept[entry.name] = verdict
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            del self._by_name[entry.name]
            if not entry.done.done():
                entry.done.set_result(verdict)
