"""The mask server's serving process: takes requests of the worker, and answers them from its matchers.

Owns the loop and the thread that prepares constraints. llguidance drops Python's lock while it computes, so masks go on
while a constraint is prepared. The process ends when the worker closes the socket, or kills it.
"""

import os
import queue
import socket
import threading

import numpy as np

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
from gpu_worker.constraints.matchers import NO_TOKEN, FollowedRow, MatcherError, Matchers, sentence_of

_NOTHING = -1
# Output tokens that are taken at once; the progress changes after each piece.
_PIECE = 64


class MaskServer:
    """Serves one worker."""

    def __init__(self, connection: socket.socket, area: SharedArea, matchers: Matchers) -> None:
        """connection: a socket of packets."""
        self._connection, self._area, self._matchers = connection, area, matchers
        # Python reads and writes memoryviews faster than numpy's elements.
        self._progress = memoryview(area.progress)
        self._tokens = [memoryview(tokens) for tokens in area.tokens]
        self._count = 0
        self._wanted: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        # Ids that were dropped while they waited for the thread, or in it.
        self._dropped: set[int] = set()
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Returns when the worker has closed the socket."""
        self._progress[SUBJECT], self._progress[PREPARED] = IDLE, _NOTHING
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
        progress = self._progress
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
        found: list[int] = []
        rows: list[FollowedRow | None] = []
        detail = ""
        for row, start, constraint, num_tokens in entries:
            own, state = None, RowState.FAILED
            try:
                self._begin(row, num_tokens)
                own = self._taken(row, start, constraint, num_tokens)
                state = RowState.COMPLETE if self._matchers.is_complete(own) else RowState.OPEN
            except BaseException as reason:  # llguidance's panics are no Exceptions
                detail = detail or f"{sentence_of(reason)} (at output token {num_tokens})"
                own = None
            rows.append(own)
            found.append(state)
        self._send(states(Kind.TAKEN, frame.number, found, detail))
        self._send(states(Kind.MASKED, frame.number, found, self._masked(entries, rows, found)))

    def _masked(self, entries: list[list[int]], rows: list[FollowedRow | None], found: list[int]) -> str:
        """Computes the masks of the rows that are no None. Changes the states of those that fail; returns the reason
        of the first."""
        detail, masks = "", self._area.masks
        address, size = masks.ctypes.data, masks.strides[0]
        for i, own in enumerate(rows):
            if own is None:
                continue
            row, _, _, num_tokens = entries[i]
            self._begin(row, num_tokens + 1)
            try:
                self._matchers.fill(own, address + row * size)
            except BaseException as reason:  # llguidance's panics are no Exceptions
                detail = detail or f"{sentence_of(reason)} (at output token {num_tokens + 1})"
                found[i] = RowState.FAILED
        are_possible = masks[[row for row, _, _, _ in entries]].any(1)
        if not are_possible.all():
            for i in np.flatnonzero(~are_possible).tolist():
                if found[i] != RowState.FAILED:
                    detail = detail or f"{NO_TOKEN} (at output token {entries[i][3] + 1})"
                    found[i] = RowState.FAILED
        return detail

    def _taken(self, row: int, start: int, constraint: int, num_tokens: int) -> FollowedRow:
        """The row with all its output tokens. Raises MatcherError, and whatever llguidance raises."""
        own = self._matchers.row(row, start, constraint)
        tokens = self._tokens[row]
        while own.num_tokens < num_tokens:
            end = min(own.num_tokens + _PIECE, num_tokens)
            self._matchers.take(own, tokens[own.num_tokens : end].tolist())
            if end < num_tokens:
                self._begin(row, end + 1)
        return own

    def _begin(self, subject: int, token: int) -> None:
        """Shows the worker what is computed from now on."""
        progress = self._progress
        progress[SUBJECT], progress[TOKEN] = subject, token
        self._count += 1
        progress[COUNT] = self._count

    def _send(self, frame: Frame) -> None:
        self._connection.send(frame.encoded())
