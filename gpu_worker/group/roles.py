"""The roles of ranks: the leader passes the scheduler's frames on before it acts on them, the others carry them out.

The leader asks for no answer: its own step cannot end before every rank has made the step's collective calls. A
follower applies the same plans to the same row tables, so a plan that does not fit its tables has the same fate as on
the leader. It ends when the leader says so; `pulse` ends it if the leader is lost.
"""

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from gpu_worker.group.failures import RankLost
from gpu_worker.group.pulse import Pulse
from gpu_worker.group.wires import FRAME, HELLO, STOP, Wires, name_of, rank_of
from gpu_worker.process.ranks import Ranks
from gpu_worker.wire.frames import parse_frame

if TYPE_CHECKING:
    from gpu_worker.step.runner import Runner

log = logging.getLogger(__name__)

# Followers connect once their own start has ended.
_CONNECT_SECONDS = 60.0
# For the last word.
_LINGER_MS = 200
# A follower's waits [ms], while the device computes, and otherwise.
_BUSY_POLL_MS, _IDLE_POLL_MS = 1, 500


class Leader(Pulse):
    """Rank 0's word to the followers, and its signs of life while it serves."""

    def __init__(self, ranks: Ranks, wires: Wires) -> None:
        """Waits for the followers. Raises RankLost."""
        super().__init__(ranks, wires.signs)
        self._wires, self._frames = wires, wires.frames
        self._frames.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._frames.setsockopt(zmq.LINGER, _LINGER_MS)
        missing, until = set(range(1, self._ranks.size)), time.monotonic() + _CONNECT_SECONDS
        while missing:
            left = until - time.monotonic()
            if left <= 0 or not self._frames.poll(round(left * 1e3)):
                raise RankLost(f"ranks {sorted(missing)} have not connected in {_CONNECT_SECONDS:g} s")
            missing.discard(rank_of(self._frames.recv_multipart()[0]) or 0)
        self.start()

    def forward(self, frame: bytes) -> None:
        """Sends a frame of the scheduler to every follower. Raises RankLost."""
        self._tell(FRAME, frame)

    def close(self) -> None:
        """Lets the followers end, if they still take frames, and closes the socket."""
        self.stop()
        with suppress(RankLost):
            self._tell(STOP)
        self._frames.close()
        self._wires.close()

    def _tell(self, *parts: bytes) -> None:
        for rank in range(1, self._ranks.size):
            try:
                self._frames.send_multipart([name_of(rank), *parts], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankLost(f"rank {rank} of {self._ranks.size} does not take frames: {error}") from error


def follow(runner: "Runner", ranks: Ranks, wires: Wires, *, max_in_flight: int) -> None:
    """Reports this rank to the leader, and follows until that says STOP. Raises fatal exceptions of the runner."""
    pulse, socket = Pulse(ranks, wires.signs), wires.frames
    socket.send(HELLO)
    pulse.start()
    log.info("ready: this rank follows rank 0 of %d", ranks.size)
    while True:
        pulse.turn()
        while runner.collect(wait=False) is not None:
            pass
        if not socket.poll(_BUSY_POLL_MS if runner.num_in_flight else _IDLE_POLL_MS):
            continue
        with pulse.step():
            while runner.num_in_flight >= max_in_flight:
                runner.collect()
            kind, *rest = socket.recv_multipart()
            if kind == STOP:
                return
            if kind == FRAME:
                _carry_out(rest[0], runner, pulse)


def _carry_out(frame: bytes, runner: "Runner", pulse: Pulse) -> None:
    message = parse_frame(frame)
    match message.WhichOneof("message"):
        case "plan":
            runner.submit(message.plan)
        case "load_weights":
            assert runner.weights is not None, "every rank can load weights"
            with pulse.exempt():
                runner.weights.load(message.load_weights)
        case _:
            runner.join(message.joined)
