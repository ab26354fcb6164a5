"""A follower: carries out the frames that the leader passes on, and answers nobody.

Owns the socket to the leader. It applies the same plans to the same row tables, so a plan that does not fit its tables
has the same fate as on the leader. It ends when the leader says so, or is silent.
"""

import signal
import time
from pathlib import Path

import zmq

from gpu_worker.group.ranks import Ranks
from gpu_worker.group.words import (
    BEAT,
    BEAT_SECONDS,
    FRAME,
    HIGH_WATER_MARK,
    SILENCE_SECONDS,
    STOP,
    RankLost,
    endpoint_of,
    name_of,
)
from gpu_worker.link.connection import MAX_FRAME_BYTES
from gpu_worker.link.plan_runner import PlanRunner
from gpu_worker.wire.frames import parse_frame

# While the device computes.
_BUSY_POLL_MS = 1


class Follower:
    """One rank above 0."""

    def __init__(self, runner: PlanRunner, ranks: Ranks, runtime_dir: Path, launcher_pid: int, max_in_flight: int):
        self._runner, self._ranks, self._max_in_flight = runner, ranks, max_in_flight
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, name_of(ranks.rank))
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(endpoint_of(runtime_dir, launcher_pid))
        self._beat_at = 0.0

    def serve(self) -> None:
        """Follows until the leader says STOP. Raises RankLost if it is silent, and fatal exceptions of the runner."""
        # The leader ends the group in order; at a terminal both get the signal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        heard = 0.0
        while True:
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + BEAT_SECONDS
                self._socket.send_multipart([BEAT], zmq.NOBLOCK)
            while self._runner.collect(wait=False) is not None:
                heard = time.monotonic()
            busy = self._runner.num_in_flight > 0
            if not self._socket.poll(_BUSY_POLL_MS if busy else BEAT_SECONDS * 1e3):
                # Before the first message the leader still starts.
                if heard and not busy and time.monotonic() - heard > SILENCE_SECONDS:
                    raise RankLost(f"the leader of {self._ranks.size} ranks was silent for {SILENCE_SECONDS:g} s")
                continue
            while self._runner.num_in_flight >= self._max_in_flight:
                self._runner.collect()
            kind, *rest = self._socket.recv_multipart()
            if kind == STOP:
                return
            if kind == FRAME:
                self._handle(rest[0])
            heard = time.monotonic()

    def _handle(self, frame: bytes) -> None:
        message = parse_frame(frame)
        if message.WhichOneof("message") == "plan":
            self._runner.submit(message.plan)
        else:
            self._runner.join(message.joined)
