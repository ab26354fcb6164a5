"""Signs of life between the ranks of a group: a thread in each rank says how its serving loop fares.

The thread alone would go on in a process with a loop that hangs, so a sign contains the loop's age: the time since its
last turn, or since the begin of its step. If a rank is silent or hangs, this process ends at once, because its own loop
may be in a collective call that waits for that rank; its launcher then kills the others of its host. Owns the thread,
and the socket once it runs.
"""

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from gpu_worker.group.failures import GROUP_LOST
from gpu_worker.group.wires import name_of, rank_of
from gpu_worker.link.link import Alone
from gpu_worker.process.ranks import Ranks
from tandem_contract.needed import NeededThread

log = logging.getLogger(__name__)

SIGN_SECONDS = 0.5
SILENCE_SECONDS = 2.0
# Longer than any step; the scheduler's limit for a step is shorter, and it knows the step.
STEP_SECONDS = 120.0
# Seconds since the loop's last turn, and since its step began (0: it is in none).
_SIGN = struct.Struct("<dd")
# So that the line is written.
_LOG_SECONDS = 0.2


def _end(reason: str) -> None:
    log.warning("this rank ends: %s", reason)
    time.sleep(_LOG_SECONDS)
    os._exit(GROUP_LOST)


class Pulse(Alone):
    """`turn` and `step` are called by the serving loop; the thread runs until the process ends."""

    def __init__(self, ranks: Ranks, socket: zmq.Socket[bytes], end: Callable[[str], None] = _end) -> None:
        """socket: `Wires.signs`. end: called once, when another rank is lost, with the reason."""
        self._ranks, self._socket, self._end = ranks, socket, end
        self._turned_at, self._step_since = time.monotonic(), 0.0
        self._is_exempt = False
        self._stopping = threading.Event()
        self._thread = NeededThread(target=self._run, name="signs of life")

    def start(self) -> None:
        """Begins to send and to expect signs."""
        self._turned_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread: this rank ends in order."""
        self._stopping.set()
        self._thread.join()

    def turn(self) -> None:
        self._turned_at = time.monotonic()

    @contextmanager
    def step(self) -> Iterator[None]:
        self._step_since = time.monotonic()
        try:
            yield
        finally:
            self._turned_at, self._step_since = time.monotonic(), 0.0

    @contextmanager
    def exempt(self) -> Iterator[None]:
        self._is_exempt = True
        try:
            yield
        finally:
            self._turned_at, self._is_exempt = time.monotonic(), False

    def _run(self) -> None:
        socket = self._socket
        others = range(1, self._ranks.size) if self._ranks.is_leader else [0]
        # The leader has heard of all others before. If it has sent nothing yet, it still starts.
        heard = dict.fromkeys(others, time.monotonic()) if self._ranks.is_leader else {}
        while not self._stopping.wait(0):
            reason = self._listen(socket, heard)
            for rank in others:
                self._say(socket, rank)
            now = time.monotonic()
            silent = [rank for rank, at in heard.items() if now - at > SILENCE_SECONDS]
            if silent:
                reason = f"rank {silent[0]} of {self._ranks.size} was silent for {now - heard[silent[0]]:.1f} s"
            if reason:
                self._end(reason)
                break
        socket.close(0)

    def _listen(self, socket: zmq.Socket[bytes], heard: dict[int, float]) -> str:
        """Reads signs for SIGN_SECONDS. Returns why a rank is lost, "" if none is."""
        until = time.monotonic() + SIGN_SECONDS
        while (left := until - time.monotonic()) > 0 and not self._stopping.is_set():
            if not socket.poll(round(min(left, 0.1) * 1e3)):
                continue
            *name, sign = socket.recv_multipart()
            rank = rank_of(name[0]) if name else 0
            if rank is None or len(sign) != _SIGN.size:
                continue
            heard[rank] = time.monotonic()
            turned, in_step = _SIGN.unpack(sign)
            if not in_step and turned > SILENCE_SECONDS:
                return f"rank {rank} of {self._ranks.size} hangs: its loop has not turned for {turned:.1f} s"
            if in_step > STEP_SECONDS:
                return f"rank {rank} of {self._ranks.size} hangs: its step takes {in_step:.0f} s"
        return ""

    def _say(self, socket: zmq.Socket[bytes], rank: int) -> None:
        now, since = time.monotonic(), self._step_since
        turned, in_step = (0.0, 0.0) if self._is_exempt else (now - self._turned_at, now - since if since else 0.0)
        sign = _SIGN.pack(turned, in_step)
        try:
            socket.send_multipart([name_of(rank), sign] if self._ranks.is_leader else [sign], zmq.NOBLOCK)
        except zmq.Again:
            # The other end does not read; its own signs show why.
            log.debug("rank %d takes no signs", rank)
