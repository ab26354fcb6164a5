"""The mask server's serving process: takes requests of the worker, and answers them from its matchers.

Owns the loop and the thread that prepares constraints. llguidance drops Python's lock while it computes, so masks go on
while a constraint is prepared. The process ends when the worker closes the socket, or kills it.
"""

import os
import queue
import socket
import threading
from contextlib import suppress

import numpy as np

from gpu_worker.constraints.frames import (
    MAX_BYTES,
    PREPARED,
    SERVING,
    WORK,
    Fate,
    Frame,
    Kind,
    SharedArea,
    Stage,
    decoded,
    limited,
    states,
    work_word,
)
from gpu_worker.constraints.matchers import NO_TOKEN, FollowedRow, MatcherError, Matchers, sentence_of
from tandem_contract.needed import NeededThread

_NOTHING = 0
# Output tokens that are taken at once; the progress changes after each piece.
_PIECE = 64


class MaskServer:
    """Serves one worker."""

    def __init__(self, connection: socket.socket, area: SharedArea, matchers: Matchers, slowness: float = 1.0) -> None:
        """connection: a socket of packets. slowness: of this machine."""
        self._slowness = slowness
        self._connection, self._area, self._matchers = connection, area, matchers
        # Python reads and writes memoryviews faster than numpy's elements.
        self._progress = area.progress.data
        self._tokens = [memoryview(tokens) for tokens in area.tokens]
        self._wanted: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        # Ids that wait for the thread, or are in it, and were not dropped meanwhile.
        self._pending: set[int] = set()
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Returns when the worker has closed the socket."""
        self._progress[PREPARED] = _NOTHING
        self._show(Stage.IDLE, 0)
        preparing = NeededThread(target=self._prepare, name="prepare")
        preparing.start()
        self._send(Frame(Kind.SERVING, os.getpid(), SERVING.pack(preparing.native_id or 0, self._slowness)))
        while packet := self._connection.recv(MAX_BYTES + 1):
            frame = decoded(packet)
            match frame.kind:
                case Kind.PREPARE:
                    with self._lock:
                        self._pending.add(frame.number)
                    self._wanted.put(frame)
                case Kind.DEFINE:
                    self._define(frame)
                case Kind.DROP:
                    with self._lock:
                        self._pending.discard(frame.number)
                        self._matchers.drop(frame.number)
                case _:
                    self._advance(frame)
            self._show(Stage.IDLE, frame.number)

    def _prepare(self) -> None:
        """Compiles constraints, one after another, in a thread of its own."""
        progress = self._progress
        while True:
            frame = self._wanted.get()
            progress[PREPARED] = frame.number
            error = ""
            try:
                compiled = self._matchers.compiled(frame.payload)
                with self._lock:
                    if frame.number in self._pending:
                        self._matchers.define(frame.number, compiled)
            except MatcherError as reason:
                error = str(reason)
            with self._lock:
                self._pending.discard(frame.number)
            progress[PREPARED] = _NOTHING
            self._send(Frame(Kind.PREPARED, frame.number, limited(error)))

    def _define(self, frame: Frame) -> None:
        """Compiles a constraint that was prepared before; rows get the error themselves if it fails now."""
        self._show(Stage.DEFINE, frame.number)
        with suppress(MatcherError):
            self._matchers.define(frame.number, self._matchers.compiled(frame.payload))

    def _advance(self, frame: Frame) -> None:
        """Lets rows take their tokens, says which are complete, then computes the masks of the others."""
        entries = frame.entries().tolist()
        fates: list[int] = []
        rows: list[FollowedRow | None] = []
        detail = ""
        for i, (row, start, constraint, num_tokens) in enumerate(entries):
            followed, state = None, Fate.FAILED
            try:
                self._show(Stage.TAKE, frame.number, i, num_tokens)
                followed = self._matchers.row(row, start, constraint)
                self._take(followed, self._tokens[row], frame.number, i, num_tokens)
                state = Fate.COMPLETE if self._matchers.is_complete(followed) else Fate.OPEN
            except BaseException as reason:  # llguidance's panics are not Exceptions
                detail = detail or f"{sentence_of(reason)} (at output token {num_tokens})"
                followed = None
            rows.append(followed)
            fates.append(state)
        self._send(states(Kind.TAKEN, frame.number, fates, detail))
        self._send(states(Kind.MASKED, frame.number, fates, self._masked(frame.number, entries, rows, fates)))

    def _masked(self, request: int, entries: list[list[int]], rows: list[FollowedRow | None], fates: list[int]) -> str:
        """Computes the masks of the rows other than None. Changes the states of those that fail; returns the reason
        of the first."""
        detail, masks = "", self._area.masks
        address, size = masks.ctypes.data, masks.strides[0]
        for i, followed in enumerate(rows):
            if followed is None:
                continue
            row, _, _, num_tokens = entries[i]
            self._show(Stage.MASK, request, i, num_tokens + 1)
            try:
                self._matchers.fill(followed, address + row * size)
            except BaseException as reason:  # llguidance's panics are not Exceptions
                detail = detail or f"{sentence_of(reason)} (at output token {num_tokens + 1})"
                fates[i] = Fate.FAILED
        are_possible = masks[[row for row, _, _, _ in entries]].any(1)
        if not are_possible.all():
            for i in np.flatnonzero(~are_possible).tolist():
                if fates[i] != Fate.FAILED:
                    detail = detail or f"{NO_TOKEN} (at output token {entries[i][3] + 1})"
                    fates[i] = Fate.FAILED
        return detail

    def _take(self, followed: FollowedRow, tokens: memoryview, request: int, entry: int, num_tokens: int) -> None:
        """Lets the row have all its output tokens. Raises MatcherError, and the exceptions of llguidance."""
        while followed.num_tokens < num_tokens:
            end = min(followed.num_tokens + _PIECE, num_tokens)
            self._matchers.take(followed, tokens[followed.num_tokens : end].tolist())
            if end < num_tokens:
                self._show(Stage.TAKE, request, entry, end + 1)

    def _show(self, stage: Stage, number: int, entry: int = 0, token: int = 0) -> None:
        """Shows the worker what is done from now on, in one word."""
        self._progress[WORK] = work_word(stage, number, entry, token)

    def _send(self, frame: Frame) -> None:
        self._connection.send(frame.encoded())
