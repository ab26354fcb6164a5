"""Which grammar is tried next, for which tenant, and the answers of earlier trials. Owns the process that tries them.

The tenant that has used the least time of the process goes first (`rpc/gate`), and equal grammars share one trial. The
other side of the process is `scheduler_svc/constraint_trial`.
"""

import asyncio
import os
import signal
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scheduler_svc.constraint_trial import ANY, MAX_PACKET, SHARE, packed, unpacked
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate
from tandem_contract.fork_server import ForkServer, cpu_seconds
from tandem_contract.grammars import COMPILE_SECONDS, START_SECONDS, limit_words
from tandem_contract.needed import needed_task

# Wall time after which nothing is known about the grammar, because the machine is busy.
PATIENCE_SECONDS = 10.0
# Wall time after which a trial that has got less than a quarter of it in CPU time begins again, with a share of its
# own: where others want all of the CPU, 10 s bring a trial that gives way to all of them 10 ms.
IDLE_SECONDS = 1.0
# Between two looks at the CPU clock.
_SLICE_SECONDS = 0.05
# One death may be another's doing, such as the kernel's when memory is short.
MAX_DEATHS = 2
MAX_KEPT = 1_024
# The most trials of one tenant that wait.
MAX_WAITING = 8


class TrialUnusable(Exception):
    """No process can try grammars for this model; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    # Why the grammar is refused, in one sentence; empty if it is not.
    refusal: str = ""
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
        self._child = 0

    async def judge(self, grammar: str) -> Verdict:
        """Tries a grammar, at first with CPU time that nothing else wants. Raises TrialUnusable."""
        verdict = await self._judge_to_end(grammar, ANY)
        return await self._judge_to_end(grammar, SHARE) if verdict.is_unknown else verdict

    async def _judge_to_end(self, grammar: str, mark: bytes) -> Verdict:
        """Tries it again if the process dies."""
        for _ in range(MAX_DEATHS):
            if not self._child:
                await self._begin()
            if (verdict := await self._judge(grammar, mark)) is not None:
                return verdict
            self._leave_child()
        why = f"its trial ended the process that tries it, {MAX_DEATHS} times, perhaps out of memory"
        return Verdict(refusal=why, was_killed=True)

    async def _judge(self, grammar: str, mark: bytes) -> Verdict | None:
        """None if the child has ended without a word."""
        assert self._connection is not None
        cpu_before = cpu_seconds(self._child)
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, packed(grammar, mark))
            answer = await self._wait(self._connection, cpu_before, gives_way=mark == ANY)
        except OSError:
            return None
        except BaseException:
            # The caller has gone; the child still computes.
            self._kill_child()
            raise
        if isinstance(answer, Verdict):
            self._kill_child()
            return answer
        return Verdict(refusal=unpacked(answer)) if answer else None

    def close(self) -> None:
        self._leave_child()
        self._forks.kill()

    async def _wait(self, connection: socket.socket, cpu_before: float, *, gives_way: bool) -> Verdict | bytes:
        """Returns the child's answer, empty if it has ended, or the verdict if it takes too long."""
        loop = asyncio.get_running_loop()
        answer = asyncio.ensure_future(loop.sock_recv(connection, MAX_PACKET))
        begun, words = loop.time(), limit_words(self._cpu_limit, self.slowness)
        try:
            while not (await asyncio.wait([answer], timeout=_SLICE_SECONDS))[0]:
                used, waited = cpu_seconds(self._child) - cpu_before, loop.time() - begun
                if used > self._cpu_limit * self.slowness:
                    return Verdict(refusal=f"its trial took {used:.3g} s of CPU time; {words}", was_killed=True)
                if waited > self._patience or (gives_way and waited > max(IDLE_SECONDS, 4 * used)):
                    got = f"its trial got {used:.2g} s of CPU time in {waited:.0f} s, because the machine is busy"
                    return Verdict(refusal=f"{got}; {words}", was_killed=True, is_unknown=True)
            return answer.result()
        finally:
            # The loop must have let go of the socket before it is closed.
            answer.cancel()
            await asyncio.wait([answer])
            if not answer.cancelled():
                answer.exception()

    async def _begin(self) -> None:
        """Starts the process, unless it runs, and a child that serves. Raises TrialUnusable."""
        for _ in range(MAX_DEATHS):
            packet = b""
            # One that a cancelled start has left.
            self._leave_child()
            try:
                self._connection = self._forks.fork()
                with suppress(ConnectionError):
                    async with asyncio.timeout(START_SECONDS):
                        packet = await asyncio.get_running_loop().sock_recv(self._connection, MAX_PACKET)
                words = "" if packet else self._forks.last_words()
            except OSError as error:
                self.close()
                raise TrialUnusable(f"{type(error).__name__}: {error}") from None
            if packet:
                process, slowness = unpacked(packet).split()
                self._child, self.slowness = int(process), float(slowness)
                return
            self.close()
            if words:
                raise TrialUnusable(words)
        raise TrialUnusable("its process has ended")

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


@dataclass(slots=True, eq=False)
class _Trial:
    done: "asyncio.Future[Verdict]"
    task: "asyncio.Task[object] | None" = None
    # Callers that wait for it.
    num_callers: int = 0


class Trials:
    def __init__(self, process: TrialProcess, *, clock: Callable[[], float], on_end: Callable[[Verdict], None]) -> None:
        """`clock` returns seconds that never go back. `on_end` gets the verdict of each trial."""
        self._process = process
        self._clock, self._on_end = clock, on_end
        waiting = Bound(
            per_key=MAX_WAITING,
            thing="new constraint of the caller",
            state="wait for their trial",
            retry_seconds=COMPILE_SECONDS,
        )
        self._gate = Gate(Bound(most=1, is_shared=False), waiting)
        # By the hash of the grammar.
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._trials: dict[bytes, _Trial] = {}

    async def judge(self, name: bytes, grammar: str, tenant: str) -> Verdict:
        """Returns the verdict on the grammar with hash `name`. Raises Refusal if too many of the tenant wait."""
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        trial = self._trials.get(name) or self._begin(name, grammar, tenant)
        trial.num_callers += 1
        try:
            return await asyncio.shield(trial.done)
        finally:
            trial.num_callers -= 1

    def close(self) -> None:
        """Ends the process; what waits is refused."""
        for trial in self._trials.values():
            assert trial.task is not None
            trial.task.cancel()
            trial.done.set_exception(status.not_ready("the model is not served any more"))
            # Its callers may all have gone.
            trial.done.exception()
        self._process.close()

    def _begin(self, name: bytes, grammar: str, tenant: str) -> _Trial:
        turn = self._gate.ask(tenant)
        trial = self._trials[name] = _Trial(asyncio.get_running_loop().create_future())
        trial.task = needed_task(self._try(trial, turn, name, grammar, tenant), "trials")
        return trial

    async def _try(
        self, trial: _Trial, turn: "asyncio.Future[None] | None", name: bytes, grammar: str, tenant: str
    ) -> None:
        if turn is not None:
            await turn
        begun, verdict = self._clock(), None
        try:
            if trial.num_callers:
                verdict = await self._process.judge(grammar)
        except TrialUnusable as reason:
            verdict = Verdict(refusal=f"constraints cannot be tried: {reason}", is_unknown=True)
        finally:
            self._gate.leave(tenant, self._clock() - begun)
        del self._trials[name]
        if verdict is None:
            return
        self._on_end(verdict)
        if not verdict.is_unknown:
            self._kept[name] = verdict
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        trial.done.set_result(verdict)
