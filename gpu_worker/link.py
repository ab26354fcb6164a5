"""The worker's end of the socket to the core: joins, takes plans, sends results, says it is alive.

Owns the DEALER and the order of things on it. Knows nothing of tensors; plans go to the runner as they came. The core
may be absent, start later, be replaced: an unanswered Join or a Rejoin leads to another Join, nothing is kept.
"""

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import zmq
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.wire.frames import FrameError, Outcome, parse_frame, result_frame

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.8
REFUSED_RETRY_SECONDS = 0.5
# Plans and results are a few per second to a few thousand; more waiting than this means a peer that is gone.
HIGH_WATER_MARK = 64
MAX_FRAME_BYTES = 64 << 20
# While the device works: how long a look at the socket may take.
_BUSY_POLL_SECONDS = 50e-6


class JoinRefused(RuntimeError):
    """The core does not want this worker and says not to try again."""


class PlanRunner(Protocol):
    """What the link needs of a runner."""

    @property
    def num_in_flight(self) -> int: ...
    def reset(self, generation: int) -> None: ...
    def submit(self, message: pb.StepPlan) -> None: ...
    def collect(self, *, wait: bool = True) -> Outcome | None: ...


class Link:
    """One connection to a core, for as long as the process serves."""

    def __init__(self, endpoint: str, join: pb.Join, runner: PlanRunner, *, max_in_flight: int) -> None:
        self._join, self._runner, self._max_in_flight = join, runner, max_in_flight
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, f"w-{os.getpid()}-{secrets.token_hex(4)}".encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Nothing is queued for a core that is not there: a new core must not read a dead one's mail.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(endpoint)
        self._endpoint = endpoint
        self._join_at: float | None = 0.0
        self._joined = False
        self._last_sent = 0.0
        self._stopping = False
        self._num_bad_frames = 0
        # What was said last, so that a state is told once and not at every try.
        self._last_refusal = ""
        self._is_alone = False

    def serve(self) -> None:
        """Serves until a signal asks to stop. Raises JoinRefused and whatever the runner cannot survive."""
        with _signals_wake(self._stop) as wake:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            try:
                while not self._stopping:
                    self._keep_in_touch()
                    if self._runner.num_in_flight == 0:
                        poller.poll(self._idle_ms())
                    self._take_frames()
                    self._send_outcomes()
            finally:
                # In good order after a signal; also where the device is lost, so that the lane is reset at once.
                self._send(pb.WorkerToCore(leave=pb.Leave()).SerializeToString())
                self._socket.close()
                # Waits until the last frames are gone, LINGER at most.
                self._context.term()

    def _stop(self) -> None:
        self._stopping = True

    def _idle_ms(self) -> int:
        now = time.monotonic()
        until = now + HEARTBEAT_SECONDS
        if self._join_at is not None:
            # Also how often a Join is tried while no core is there.
            until = min(until, max(self._join_at, now + 0.02))
        return max(1, int((until - now) * 1e3))

    def _keep_in_touch(self) -> None:
        """Join where one is due, else a heartbeat where nothing was sent for a while."""
        now = time.monotonic()
        if self._join_at is not None and now >= self._join_at:
            if self._send(pb.WorkerToCore(join=self._join).SerializeToString()):
                self._join_at = None
                log.debug("sent Join to %s", self._endpoint)
            return
        if now - self._last_sent >= HEARTBEAT_SECONDS and self._join_at is None:
            phase = "stepping" if self._runner.num_in_flight else "ready"
            self._send(pb.WorkerToCore(heartbeat=pb.Heartbeat(phase=phase)).SerializeToString())

    def _take_frames(self) -> None:
        """Reads what is there, up to the plans that may be in flight."""
        while self._runner.num_in_flight < self._max_in_flight:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not frame:
                continue  # the core's probe: are you still there?
            try:
                self._handle(parse_frame(frame))
            except FrameError as error:
                self._num_bad_frames += 1
                log.warning("dropped a frame (%d so far): %s", self._num_bad_frames, error)
            # What is done leaves at once: on a CPU a plan runs inside `submit`, and the core must be told before the
            # next one does.
            self._send_done()

    def _handle(self, message: pb.CoreToWorker) -> None:
        kind = message.WhichOneof("message")
        if kind == "plan":
            if self._joined:
                self._runner.submit(message.plan)
        elif kind == "joined":
            self._joined, self._join_at, self._last_refusal = True, None, ""
            self._runner.join(message.joined.generation)
            log.info("joined; generation %d", message.joined.generation)
        elif kind == "rejoin":
            self._joined, self._join_at = False, 0.0
            log.info("the scheduler does not know this worker; joining again")
        elif kind == "refused":
            self._joined = False
            if not message.refused.retry:
                raise JoinRefused(message.refused.reason)
            if message.refused.reason != self._last_refusal:
                self._last_refusal = message.refused.reason
                log.info("standing by, asking again every %g s: %s", REFUSED_RETRY_SECONDS, message.refused.reason)
            self._join_at = time.monotonic() + REFUSED_RETRY_SECONDS

    def _send_outcomes(self) -> None:
        """Sends what is done; where the device is at work, waits for it a moment, ready for the next plan."""
        self._send_done()
        if self._runner.num_in_flight:
            time.sleep(_BUSY_POLL_SECONDS)

    def _send_done(self) -> None:
        while (outcome := self._runner.collect(wait=False)) is not None:
            self._send(result_frame(outcome))

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # No core, or one that does not read: it will not know this worker and say Rejoin.
            if self._joined and not self._is_alone:
                self._is_alone = True
                log.warning("the scheduler is gone; waiting for one at %s", self._endpoint)
            return False
        self._is_alone = False
        self._last_sent = time.monotonic()
        return True


@contextmanager
def _signals_wake(stop: Callable[[], None]) -> Iterator[socket.socket]:
    """SIGTERM and SIGINT call `stop` and make the yielded socket readable, so that a poll returns."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    previous_fd = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        wake.close()
        woken.close()
