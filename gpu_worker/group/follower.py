"""A follower: carries out the frames that the leader passes on, and answers nobody.

It applies the same plans to the same row tables, so a plan that does not fit its tables has the same fate as on the
leader. It ends when the leader says so; `pulse` ends it if the leader is lost.
"""

import logging
import signal

from gpu_worker.group.pulse import Pulse
from gpu_worker.group.wires import Wires
from gpu_worker.group.words import FRAME, HELLO, STOP
from gpu_worker.link.link import PlanRunner
from gpu_worker.process.ranks import Ranks
from gpu_worker.wire.frames import parse_frame

log = logging.getLogger(__name__)

# While the device computes, and otherwise.
_BUSY_POLL_MS, _IDLE_POLL_MS = 1, 500


class Follower:
    """One rank above 0."""

    def __init__(self, runner: PlanRunner, ranks: Ranks, wires: Wires, *, max_in_flight: int) -> None:
        """Tells the leader that this rank is here."""
        self._runner, self._size, self._max_in_flight = runner, ranks.size, max_in_flight
        self._pulse = Pulse(ranks, wires.signs)
        self._socket = wires.frames
        self._socket.send(HELLO)

    def serve(self) -> None:
        """Follows until the leader says STOP. Raises fatal exceptions of the runner."""
        # At a terminal all ranks get the signal; the leader ends the group in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._pulse.start()
        log.info("ready: this rank follows rank 0 of %d", self._size)
        while True:
            self._pulse.turn()
            while self._runner.collect(wait=False) is not None:
                pass
            if not self._socket.poll(_BUSY_POLL_MS if self._runner.num_in_flight else _IDLE_POLL_MS):
                continue
            with self._pulse.step():
                while self._runner.num_in_flight >= self._max_in_flight:
                    self._runner.collect()
                kind, *rest = self._socket.recv_multipart()
                if kind == STOP:
                    return
                if kind == FRAME:
                    self._handle(rest[0])

    def _handle(self, frame: bytes) -> None:
        message = parse_frame(frame)
        match message.WhichOneof("message"):
            case "plan":
                self._runner.submit(message.plan)
            case "load_weights":
                assert self._runner.weights is not None, "every rank can load weights"
                with self._pulse.exempt():
                    self._runner.weights.load(message.load_weights)
            case _:
                self._runner.join(message.joined)
