"""The mask server's serving process: takes requests of the worker, and answers them from its matchers.

Owns the loop and the thread that prepares constraints. llguidance drops Python's lock while it computes, so masks go on
while a constraint is prepared. The process ends when the worker closes the socket, or kills it.
"""

import os
import queue
import socket
import threading

from gpu_worker.constraints.area import (
    COUNT,
    IDLE,
    OF_CONSTRAINT,
    PREPARE_COUNT,
    PREPARED,
    SUBJECT,
    TOKEN,
    SharedArea,
)
from gpu_worker.constraints.frames import (
    MAX_BYTES,
    Frame,
    Kind,
    RowState,
    decoded,
    limited,
    states,
)
from gpu_worker.constraints.matchers import MatcherError, Matchers

_NOTHING = -1


class MaskServer:
    """Serves one worker."""

    def __init__(self, connection: socket.socket, area: SharedArea, matchers: Matchers) -> None:
        """connection: a socket of packets."""
        self._connection, self._area, self._matchers = connection, area, matchers
        self._wanted: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        # Ids that were dropped while they waited for the thread, or in it.
        self._dropped: set[int] = set()
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Returns when the worker has closed the socket."""
        progress = self._area.progress
        progress[SUBJECT], progress[PREPARED] = IDLE, _NOTHING
        self._send(Frame(Kind.SERVING, os.getpid()))
        threading.Thread(target=self._prepare, name="prepare", daemon=True).start()
        while packet := self._connection.recv(MAX_BYTES + 1):
            frame = decoded(packet)
            match frame.kind:
                case Kind.PREPARE:
                    self._wanted.put(frame)
                case Kind.DEFINE:
                    self._define(frame)
                case Kind.DROP:
                    with self._lock:
                        self._dropped.add(frame.number)
                        self._matchers.drop(frame.number)
                case _:
                    self._advance(frame)
            self._begin(IDLE, 0)

    def _prepare(self) -> None:
        """Compiles constraints, one after another, in a thread of its own."""
        progress = self._area.progress
        while True:
            frame = self._wanted.get()
            progress[PREPARED] = frame.number
            progress[PREPARE_COUNT] += 1
            error = ""
            try:
                matcher = self._matchers.compiled(frame.payload)
                with self._lock:
                    if frame.number not in self._dropped:
                        self._matchers.define(frame.number, matcher)
            except MatcherError as reason:
                error = str(reason)
            progress[PREPARED] = _NOTHING
            progress[PREPARE_COUNT] += 1
            self._send(Frame(Kind.PREPARED, frame.number, limited(error)))

    def _define(self, frame: Frame) -> None:
        """Compiles a constraint that was prepared before; rows whose constraint fails now get the error themselves."""
        self._begin(OF_CONSTRAINT - frame.number, 0)
        try:
            self._matchers.define(frame.number, self._matchers.compiled(frame.payload))
        except MatcherError:
            return

    def _advance(self, frame: Frame) -> None:
        """Lets rows take their tokens, says which are complete, then computes the masks of the others."""
        entries = frame.entries().tolist()
        found: list[RowState] = []
        detail = ""
        for row, start, constraint, num_tokens in entries:
            state, error = self._taken(row, start, constraint, num_tokens)
            detail = detail or error
            found.append(state)
        self._send(states(Kind.TAKEN, frame.number, found, detail))
        detail = ""
        for i, (row, _, _, num_tokens) in enumerate(entries):
            if found[i] == RowState.FAILED:
                continue
            self._begin(row, num_tokens + 1)
            try:
                self._matchers.fill(row, self._area.masks[row])
            except MatcherError as reason:
                detail = detail or _at(reason, num_tokens + 1)
                found[i] = RowState.FAILED
        self._send(states(Kind.MASKED, frame.number, found, detail))

    def _taken(self, row: int, start: int, constraint: int, num_tokens: int) -> tuple[RowState, str]:
        def on_piece(num_taken: int) -> None:
            self._begin(row, num_taken + 1)

        on_piece(0)
        try:
            tokens = self._area.tokens[row, :num_tokens]
            is_complete = self._matchers.take(row, start, constraint, tokens, on_piece)
        except MatcherError as reason:
            return RowState.FAILED, _at(reason, num_tokens)
        return RowState.COMPLETE if is_complete else RowState.OPEN, ""

    def _begin(self, subject: int, token: int) -> None:
        """Shows the worker what is computed from now on."""
        progress = self._area.progress
        progress[SUBJECT], progress[TOKEN] = subject, token
        progress[COUNT] += 1

    def _send(self, frame: Frame) -> None:
        self._connection.send(frame.encoded())


def _at(reason: MatcherError, token: int) -> str:
    return f"{reason} (at output token {token})"
