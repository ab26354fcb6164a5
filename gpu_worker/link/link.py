"""The worker's end of the link to the scheduler: joins, receives plans, sends results and heartbeats.

Owns the protocol over successive connections. The scheduler may be absent, start later, be replaced, or end the
connection: every new connection and every Rejoin leads to another Join, and plans from before it are not answered.
Owns the lines, too, that say at every log level that this worker can compute; `tandem serve` reads them. Knows nothing
of tensors; plans go to the runner unread.
"""

import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.link.connection import MAX_FRAME_BYTES, Connection, CurveKeys, signals_wake
from gpu_worker.wire.frames import FrameError, join_frame, parse_frame, result_frame
from tandem_contract.files import KeyFile
from tandem_contract.logs import announce, is_worth_a_line
from tandem_contract.plural import numbered

if TYPE_CHECKING:
    from gpu_worker.step.runner import Runner

log = logging.getLogger(__name__)
# The address that clients use by default.
_DEFAULT_LISTEN = "127.0.0.1:50051"
_STANDBY_LINE = "on standby: ready to take over"
# Pauses between connections that ended before a step succeeded on them.
FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.02, 2.0
HEARTBEAT_SECONDS = 0.8
# The pause before a Join that could not be sent is tried again.
_JOIN_RETRY_SECONDS = 0.02
# While a constraint is prepared: its answer comes from another process.
_PREPARING_SECONDS = 2e-3
REFUSED_RETRY_SECONDS = 0.5
# A worker that was asked to stop leaves by itself if its scheduler says nothing for so long.
_SILENT_SECONDS = 5.0
_LINGER_MS = 500  # for the last frames when the worker ends: its last results and Leave
# While the device computes: the pause between reads of the socket, and between reads of the monitor.
_BUSY_POLL_SECONDS, _BUSY_MONITOR_SECONDS = 50e-6, 0.02


class Alone:
    """What a group's leader sends to the other ranks while it serves. Here nothing: one process has none."""

    def turn(self) -> None:
        """The serving loop turns."""

    def step(self) -> AbstractContextManager[None]:
        """The serving loop is in a step, which may take long."""
        return nullcontext()

    def exempt(self) -> AbstractContextManager[None]:
        """The serving loop does something that may take minutes."""
        return nullcontext()

    def forward(self, frame: bytes) -> None:
        """Sends a frame of the scheduler, on which this rank then acts."""


def ready_line(listen: str) -> str:
    """The log line with a command to paste once the service at `listen` is ready."""
    address = "" if listen == _DEFAULT_LISTEN else f" --address {listen}"
    return f'ready: tandem generate{address} "Return the"'


@dataclass(slots=True)
class ReadyLines:
    """Logs a line after the first step that succeeds since the worker joined or was seated."""

    # The endpoint of a scheduler on another host, which says no address for callers of this host.
    remote: str
    listen: str = ""
    # Logged after the next step that succeeds; empty if it was logged already, or the session has ended.
    line: str = ""

    def joined(self, listen: str, *, on_standby: bool) -> None:
        """A session begins. `listen` is the address of the service; without one no line is due, except on standby."""
        self.listen = listen
        self.line = _STANDBY_LINE if on_standby else self._serving_line()

    def seated(self) -> None:
        """The worker gets requests from now on."""
        log.info("no longer on standby: this worker serves now")
        self.line = self._serving_line()

    def step_succeeded(self) -> None:
        if self.line:
            announce("%s", self.line)
            self.line = ""

    def _serving_line(self) -> str:
        if self.remote:
            return f"ready: this worker serves the scheduler at {self.remote}"
        return ready_line(self.listen) if self.listen else ""


@dataclass(slots=True)
class Reconnects:
    """Connections that ended since a step succeeded: each costs a pause, and few of them a log line."""

    endpoint: str
    num_ended: int = 0

    def step_succeeded(self) -> None:
        self.num_ended = 0

    def ended(self, why: str) -> float:
        """Notes that a connection ended; `why` is empty if it was lost. Returns the seconds before the next one."""
        self.num_ended += 1
        if is_worth_a_line(self.num_ended):
            times = f" {self.num_ended} times before a step succeeded" if self.num_ended > 1 else ""
            cause = f": {why}" if why else ""
            # A scheduler that is stopped or replaced ends the connection too.
            level = logging.WARNING if times or cause else logging.INFO
            log.log(
                level, "the connection to the scheduler ended%s%s; waiting for a scheduler at %s",
                times, cause, self.endpoint,
            )  # fmt: skip
        if self.num_ended == 1:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_ended, 16), _LAST_PAUSE_SECONDS)


class JoinRefused(RuntimeError):
    """The scheduler refuses this worker, and another try is pointless."""


class Link:
    """Serves one scheduler after another until the process ends."""

    def __init__(
        self,
        endpoint: str,
        join: pb.Join,
        runner: "Runner",
        *,
        key: KeyFile | None,
        max_in_flight: int,
        curve: CurveKeys | None = None,
        ranks: Alone | None = None,
    ) -> None:
        """key: the key of a Join, read again for each Join; None: CURVE proves this worker's identity, by `curve`, the
        keys for a scheduler on another host. ranks: the others of a group.

        Raises ValueError if the Join is too large.
        """
        self._endpoint, self._join, self._runner, self._key, self._curve = endpoint, join, runner, key, curve
        self._max_in_flight, self._ranks = max_in_flight, ranks or Alone()
        self._join.max_frame_bytes = MAX_FRAME_BYTES
        join_frame(self._join)
        self._context = zmq.Context()
        self._connection = Connection(self._context, endpoint, curve)
        self._reconnects = Reconnects(endpoint)
        self._next_look_at = 0.0
        # When, on the monotonic clock, the next Join is due; None: one was sent on this connection.
        self._join_at: float | None = 0.0
        self._joined = False
        self._last_sent = 0.0
        # Asked to stop, it computes until it is dismissed: rows that no other worker takes may need it.
        self._is_asked = self._is_dismissed = False
        # Time on the loop's clock [s] when the scheduler, notified of that, last sent something; None: not notified.
        self._heard_at: float | None = None
        # Number of the oldest plans in flight that belong to an ended session.
        self._num_void = 0
        self._ready = ReadyLines(endpoint if curve else "")
        self._num_bad_frames = 0
        self._done = pb.Heartbeat()  # what the newest result that was sent says
        self._last_problem = ""  # the last one in the log, so that it is logged once and not at every try

    def serve(self) -> None:
        """Serves until a signal, after which the scheduler lets the worker go, or until it is dismissed.

        Raises JoinRefused, ValueError for a key that cannot be trusted, and fatal exceptions of the runner.
        """
        with signals_wake(self._stop) as wake:
            # Who reads the line may send a signal.
            log.info("waiting for a scheduler at %s", self._endpoint)
            poller = self._connection.poller(wake)
            try:
                while not self._is_over():
                    if self._connection.has_ended:
                        self._connect_again()
                        poller = self._connection.poller(wake)
                    self._keep_in_touch()
                    if self._runner.num_in_flight == 0:
                        self._wait(poller)
                    self._take_frames()
                    self._send_done()
                    if self._runner.num_in_flight:
                        time.sleep(_BUSY_POLL_SECONDS)
            finally:
                # Leave is also sent when the device is lost, so that the scheduler resets the lane at once.
                self._send(pb.WorkerToCore(leave=pb.Leave()).SerializeToString())
                self._connection.close(linger_ms=_LINGER_MS)
                # Waits until the last frames are sent, for the linger time at most.
                self._context.term()

    def _stop(self) -> None:
        self._is_asked = True  # by another thread

    def _is_over(self) -> bool:
        """Whether the worker ends now. Notifies the scheduler that it was asked to stop."""
        if self._is_dismissed or not self._is_asked:
            return self._is_dismissed
        if not self._joined or self._connection.has_ended:
            return True
        now = time.monotonic()
        if self._heard_at is None and self._send(pb.WorkerToCore(stops=pb.Stops()).SerializeToString()):
            self._heard_at = now
        return self._heard_at is not None and now > self._heard_at + _SILENT_SECONDS

    def _wait(self, poller: zmq.Poller) -> None:
        now = time.monotonic()
        until = now + HEARTBEAT_SECONDS
        if self._join_at is None:
            until = self._last_sent + HEARTBEAT_SECONDS
        elif self._connection.is_open:
            until = max(self._join_at, now + _JOIN_RETRY_SECONDS)
        if self._runner.constraints is not None and self._runner.constraints.is_preparing:
            until = min(until, now + _PREPARING_SECONDS)
        for readable, _ in poller.poll(max(1, math.ceil((until - now) * 1e3))):
            if readable == self._connection.monitor_fd:
                self._connection.read_monitor()

    def _connect_again(self) -> None:
        """Replaces the connection that ended; plans in flight from it are not answered."""
        self._connection.close(linger_ms=0)
        self._void_session()
        self._last_problem = ""
        until = time.monotonic() + self._reconnects.ended(self._connection.refusal)
        # A signal ends the pause early.
        while not self._is_asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, FIRST_PAUSE_SECONDS))
        self._connection = Connection(self._context, self._endpoint, self._curve)

    def _void_session(self) -> None:
        """Ends a session that the scheduler does not know: plans in flight get no answer, and a Join is due."""
        self._joined, self._join_at = False, 0.0
        self._ready.line = ""
        self._num_void = self._runner.num_in_flight

    def _keep_in_touch(self) -> None:
        """Sends a Join if one is due, else a heartbeat if nothing was sent for HEARTBEAT_SECONDS."""
        now = time.monotonic()
        if now >= self._next_look_at:
            # While the device computes, nothing polls the monitor.
            self._next_look_at = now + _BUSY_MONITOR_SECONDS
            self._connection.read_monitor()
        if self._join_at is not None:
            if now >= self._join_at and self._connection.is_open:
                self._send_join(now)
        elif now - self._last_sent >= HEARTBEAT_SECONDS:
            if self._runner.num_in_flight == 0:
                # A plan that has arrived must not count as lost.
                self._take_frames()
                if self._join_at is not None:
                    return
            self._done.num_in_flight = self._runner.num_in_flight
            self._done.phase = "stepping" if self._done.num_in_flight else "ready"
            self._send(pb.WorkerToCore(heartbeat=self._done).SerializeToString())

    def _send_join(self, now: float) -> None:
        try:
            self._join.key = b"" if self._key is None else self._key.read()
        except OSError as error:
            # The folder is being removed or created again.
            self._log_once(f"cannot read the key of the runtime folder, trying again: {error}")
            self._join_at = now + REFUSED_RETRY_SECONDS
            return
        self._runner.report_pages(self._join)
        if self._send(join_frame(self._join)):
            self._join_at = None
            log.debug("sent Join to %s", self._endpoint)

    def _take_frames(self) -> None:
        """Reads available frames until the limit of plans in flight."""
        while self._runner.num_in_flight < self._max_in_flight:
            if (frame := self._connection.receive()) is None:
                return
            if self._heard_at is not None:
                self._heard_at = time.monotonic()
            if not frame:
                continue  # an empty frame is the scheduler's probe of the connection
            try:
                self._handle(parse_frame(frame), frame)
            except FrameError as error:
                self._num_bad_frames += 1
                if is_worth_a_line(self._num_bad_frames):
                    log.warning(
                        "dropped %s so far, the last one: %s", numbered(self._num_bad_frames, "bad frame"), error
                    )
            # Sent at once, because on a CPU a plan runs inside `submit`: its result must not wait for the next plan.
            self._send_done()

    def _handle(self, message: pb.CoreToWorker, frame: bytes) -> None:
        kind = message.WhichOneof("message")
        if kind == "joined" or (self._joined and kind in ("plan", "load_weights")):
            self._ranks.forward(frame)
        if kind == "plan":
            if self._joined:
                with self._ranks.step():
                    self._runner.submit(message.plan)
        elif kind == "joined":
            self._joined, self._join_at, self._last_problem = True, None, ""
            self._done.Clear()
            self._ready.joined(message.joined.listen, on_standby=self._join.standby)
            with self._ranks.step():
                self._runner.join(message.joined)
            log.info("joined the scheduler; generation %d", message.joined.generation)
        elif kind == "rejoin":
            self._void_session()
            log.info("the scheduler does not know this worker; joining again")
        elif kind == "refused":
            self._refused(message.refused)
        elif kind == "seated":
            # After a lost connection this worker joins as one that serves.
            self._join.standby = False
            self._ready.seated()
        elif kind == "prepare_constraint" and self._joined:
            if self._runner.constraints is None:
                self._send_constraint(message.prepare_constraint.hash, "this worker takes no constraints")
            else:
                self._runner.constraints.prepare(message.prepare_constraint.hash, message.prepare_constraint.source)
        elif kind == "drop_constraint" and self._joined and self._runner.constraints is not None:
            self._runner.constraints.drop(message.drop_constraint.hash)
        elif kind == "load_weights" and self._joined:
            self._load_weights(message.load_weights)
        elif kind == "dismissed":
            log.info("the scheduler has drained this worker; it ends")
            self._is_dismissed = True

    def _load_weights(self, order: pb.LoadWeights) -> None:
        """Loads the weights, and answers. Later Joins name the version. Passes on fatal errors."""
        if self._runner.weights is None:
            loaded = pb.WeightsLoaded(version=order.version, ok=False, detail="this worker cannot load new weights")
        else:
            with self._ranks.exempt():
                loaded = self._runner.weights.load(order)
        if loaded.ok:
            self._join.weights_version, self._join.weights_folder = order.version, order.folder
        self._send(pb.WorkerToCore(weights_loaded=loaded).SerializeToString())

    def _refused(self, refused: pb.Refused) -> None:
        """Schedules another Join. Raises JoinRefused if another try is pointless."""
        self._void_session()
        self._join_at = time.monotonic() + REFUSED_RETRY_SECONDS
        if refused.retry:
            self._log_once(f"standing by, joining again every {REFUSED_RETRY_SECONDS:g} s: {refused.reason}")
        elif self._key is None or not self._key.has_changed():
            raise JoinRefused(refused.reason)

    def _log_once(self, problem: str) -> None:
        if problem != self._last_problem:
            self._last_problem = problem
            log.info("%s", problem)

    def _send_done(self) -> None:
        """Sends the results that are finished, and the answers to constraints."""
        self._ranks.turn()
        if self._runner.constraints is not None:
            for hash_, error in self._runner.constraints.answers():
                self._send_constraint(hash_, error)
        while (outcome := self._runner.collect(wait=False)) is not None:
            if self._num_void:
                self._num_void -= 1
                continue
            self._send(result_frame(outcome))
            self._done.generation, self._done.last_step = outcome.generation, outcome.step
            if outcome.status == pb.STEP_STATUS_OK:
                self._reconnects.step_succeeded()
                self._ready.step_succeeded()

    def _send_constraint(self, hash_: bytes, error: str) -> None:
        self._send(pb.WorkerToCore(constraint_ready=pb.ConstraintReady(hash=hash_, error=error)).SerializeToString())

    def _send(self, frame: bytes) -> bool:
        if not self._connection.send(frame):
            return False
        self._last_sent = time.monotonic()
        return True
