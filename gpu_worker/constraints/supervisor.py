"""Keeps a mask server running: its process, the exchange of frames, the limits of time, and the next one.

Nothing waits for the server, except `wait`. What it computes for too long fails, and what two servers ended in. Knows
nothing of the order of events in a step.
"""

import logging
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from gpu_worker.constraints.frames import (
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_NUMBER,
    SERVING,
    Frame,
    Kind,
    SharedArea,
    Sizes,
    Stage,
    Work,
    advance,
    decoded,
    new_memory,
)
from gpu_worker.constraints.rows import ConstrainedRow, Fate, Prepared, Registry
from gpu_worker.constraints.watch import SLICE_SECONDS, Excess, Limits, Watch
from tandem_contract.fork_server import ForkServer

# Before `wait` sleeps.
_SPIN_SECONDS = 0.001
log = logging.getLogger(__name__)
# Servers that may end one after another without a mask.
_MOST_DEATHS = 5
_NOT_STARTED = "no mask server can be started"


class ServerGone(Exception):
    """The serving process, or the one that forks it, has ended."""


class ServerUnusable(Exception):
    """The process says why it cannot serve this model, in one sentence."""


class ServerProcess:
    """A mask server. `replace` returns before it serves; frames wait in between."""

    def __init__(self, tokenizer_json: bytes, sizes: Sizes, eos_token_ids: Sequence[int]) -> None:
        """Makes the shared memory. Raises OSError."""
        self._memory = new_memory(sizes)
        self.area = SharedArea(self._memory, sizes)
        self._forks = ForkServer(
            "gpu_worker.constraints",
            {"sizes": asdict(sizes), "eos": list(eos_token_ids)},
            files={"tokenizer": tokenizer_json},
            descriptors={"memory": self._memory},
        )
        self._connection: socket.socket | None = None
        self._unsent: deque[bytes] = deque()

    def replace(self) -> None:
        """Kills the serving process and starts another one; frames that it has not answered are lost.

        Raises OSError if no process can be started.
        """
        self._unsent.clear()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._forks.fork()

    def send(self, frame: Frame) -> None:
        """Sends a frame now, or when the server takes it. Raises ServerGone, ServerUnusable or OSError."""
        self._unsent.append(frame.encoded())
        self._flush()

    def _flush(self) -> None:
        assert self._connection is not None, "the server was started"
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise self._end(str(error)) from None
            self._unsent.popleft()

    def receive(self) -> list[Frame]:
        """The frames that have come. Raises ServerGone, ServerUnusable, OSError or ValueError."""
        assert self._connection is not None, "the server was started"
        if self._unsent:
            self._flush()
        frames: list[Frame] = []
        while not frames or frames[-1].kind is not Kind.MASKED:
            try:
                packet = self._connection.recv(MAX_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                raise self._end("the process has ended")
            frames.append(decoded(packet))
        return frames

    def _end(self, why: str) -> ServerGone | ServerUnusable:
        """What is to be said of a server that has ended. Raises OSError if the process that forks cannot be started."""
        if (reason := self._forks.last_words()) is None:
            return ServerGone(why)
        self._forks.kill()
        return ServerUnusable(reason) if reason else ServerGone("the process that forks has ended")

    def wait(self, seconds: float) -> None:
        """Waits until a frame has come or can be sent, for `seconds` at most."""
        assert self._connection is not None, "the server was started"
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.register(self._forks, select.POLLIN)
        # The answer usually takes less time than it takes to wake up.
        spin_end = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < spin_end:
            if poller.poll(0):
                return
        poller.poll(seconds * 1e3)

    def close(self) -> None:
        """Ends the server and gives the memory back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._forks.kill()
        os.close(self._memory)


class Supervisor:
    """One mask server after another. No method raises because of a server."""

    def __init__(self, server: ServerProcess, registry: Registry, limits: Limits) -> None:
        self._server, self._registry = server, registry
        self._watch = Watch(server.area, limits)
        # The rows of requests without their last answer, each with its output tokens at that time.
        self._requests: dict[int, list[tuple[ConstrainedRow, int]]] = {}
        self._num_requests = self._num_deaths = 0
        self._is_running = False
        # Why no server can serve this model; empty if one can.
        self._refusal = ""

    def prepare(self, constraint: Prepared) -> None:
        """Sends a registered constraint to the server, which starts unless it runs."""
        if self._refusal:
            self._registry.remove(constraint, self._refusal)
        elif self._is_running:
            self._exchange(lambda: self._server.send(Frame(Kind.PREPARE, constraint.id, constraint.source)))
        else:
            self._replace()

    def drop(self, constraint: Prepared) -> None:
        if self._is_running:
            self._exchange(lambda: self._server.send(Frame(Kind.DROP, constraint.id)))

    def ask(self, rows: Iterable[ConstrainedRow]) -> None:
        """Asks for the masks that the present server was not asked for."""
        wanted = [row for row in rows if row.fate is Fate.OPEN and row.asked != row.num_tokens]
        for first in range(0, len(wanted), MAX_ENTRIES):
            part = wanted[first : first + MAX_ENTRIES]
            self._exchange(lambda part=part: self._ask(part))

    def _ask(self, wanted: list[ConstrainedRow]) -> None:
        for row in wanted:
            if not row.constraint.is_defined:
                row.constraint.is_defined = True
                self._server.send(Frame(Kind.DEFINE, row.constraint.id, row.constraint.source))
        self._num_requests = self._num_requests % MAX_NUMBER + 1
        self._requests[self._num_requests] = [(row, row.num_tokens) for row in wanted]
        for row in wanted:
            row.asked = row.num_tokens
        entries = [(row.row, row.start, row.constraint.id, row.num_tokens) for row in wanted]
        self._server.send(advance(self._num_requests, entries))

    def wait(self) -> None:
        """Waits a moment for frames; then as `look`, for a worker that waits for rows."""
        if self._is_running:
            self._server.wait(SLICE_SECONDS)
        self.look(waits_for_rows=True)

    def look(self, *, waits_for_rows: bool) -> None:
        """Takes the frames that have come, and replaces a server that takes too long."""
        if self._is_running:
            self._exchange(lambda: self._look(waits_for_rows))

    def _look(self, waits_for_rows: bool) -> None:
        for frame in self._server.receive():
            self._handle(frame)
        if self._watch.start_overran():
            raise ServerGone("it did not start in time")
        if late := self._watch.overdue_preparation():
            number, excess = late
            self._overran(self._registry.by_id.get(number), excess, f"preparing the constraint {excess.words}")
        elif waits_for_rows and (overdue := self._watch.overdue_work()) is not None:
            work, excess = overdue
            culprit = self._culprit_of(work)
            if isinstance(culprit, ConstrainedRow):
                self._overran(culprit, excess, f"the constraint {excess.words}, at output token {work.token}")
            else:
                self._overran(culprit, excess, f"preparing the constraint again {excess.words}")

    def _overran(self, culprit: ConstrainedRow | Prepared | None, excess: Excess, reason: str) -> None:
        """Replaces the server, and fails what it computes: if the limit is one of CPU time, or the second time."""
        if culprit is not None:
            culprit.num_deaths += 1
            if excess.is_of_cpu or culprit.num_deaths > 1:
                self._registry.fail(culprit, reason)
        log.warning("the mask server is replaced: %s", reason if culprit is not None else "it does not answer")
        self._replace()

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.SERVING:
            self._watch.begin(frame.number, *SERVING.unpack(frame.payload))
        elif frame.kind is Kind.PREPARED:
            self._answer(frame.number, frame.payload.decode("utf-8", "replace"))
        else:
            request = self._requests[frame.number]
            states, detail = frame.states(len(request))
            if frame.kind is Kind.MASKED:
                del self._requests[frame.number]
                self._num_deaths = 0
            for (row, num_tokens), state in zip(request, states, strict=True):
                if row.num_tokens == num_tokens:
                    _follow(row, frame.kind, state, detail)

    def _answer(self, number: int, error: str) -> None:
        constraint = self._registry.by_id.get(number)
        if constraint is None or constraint.is_answered:
            return
        self._num_deaths = 0
        if error:
            self._registry.remove(constraint, error)
        else:
            constraint.is_answered = constraint.is_defined = True
            self._registry.answers.append((constraint.hash, ""))

    def _culprit_of(self, work: Work) -> ConstrainedRow | Prepared | None:
        """What the server computes, or compiles for rows; None if its request is answered, or nothing waits for it."""
        if work.stage is Stage.DEFINE:
            return self._registry.by_id.get(work.number)
        if work.stage is Stage.IDLE:
            return None
        asked = self._requests.get(work.number, [])[work.entry : work.entry + 1]
        return next((row for row, _ in asked if row.fate is Fate.OPEN), None)

    def _exchange(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ServerUnusable as reason:
            self._refusal = f"the model's tokenizer does not serve constraints: {reason}"
            self._give_up(self._refusal)
        except OSError as error:
            self._give_up(f"{_NOT_STARTED}: {error}")
        except (ServerGone, struct.error, LookupError, ValueError) as reason:
            self._died(str(reason))

    def _died(self, reason: str) -> None:
        """Starts another server. Fails what two servers have ended in."""
        self._num_deaths += 1
        work = self._watch.work
        for culprit in (self._culprit_of(work), self._registry.by_id.get(self._watch.prepared)):
            if culprit is not None:
                culprit.num_deaths += 1
                if culprit.num_deaths > 1:
                    place = f", at output token {work.token}" if isinstance(culprit, ConstrainedRow) else ""
                    self._registry.fail(culprit, f"the constraint ended its process twice{place}")
        log.warning("the mask server is replaced: %s", reason)
        if self._num_deaths > _MOST_DEATHS:
            self._num_deaths = 0
            self._give_up(f"the mask server ended {_MOST_DEATHS + 1} times in a row: {reason}")
        else:
            self._replace()

    def _replace(self) -> None:
        """Starts a server in place of the present one, if there is one."""
        self._requests.clear()
        self._registry.forget_server()
        self._watch.restart()
        try:
            self._server.replace()
        except OSError as error:
            self._give_up(f"{_NOT_STARTED}: {error}")
            return
        self._is_running = True
        for constraint in self._registry.unanswered():
            self._exchange(
                lambda constraint=constraint: self._server.send(Frame(Kind.PREPARE, constraint.id, constraint.source))
            )

    def _give_up(self, reason: str) -> None:
        """Constraints end with this reason. The next one is tried with another server."""
        log.error("constraints end: %s", reason)
        self._is_running = False
        self._requests.clear()
        for constraint in list(self._registry.by_id.values()):
            self._registry.remove(constraint, reason)
        self._registry.forget_server()

    def close(self) -> None:
        self._is_running = False
        self._server.close()


def _follow(row: ConstrainedRow, kind: Kind, state: int, detail: str) -> None:
    if state == Fate.FAILED:
        row.fail(detail)
    elif kind is Kind.MASKED:
        row.masked, row.num_deaths, row.constraint.num_deaths = row.num_tokens, 0, 0
    else:
        row.taken = row.num_tokens
        # An empty output ends with EOS.
        if state == Fate.COMPLETE and row.num_tokens:
            row.fate = Fate.COMPLETE
