"""The core's shell: sockets and clock outside, the pure scheduler inside.

Sole owner of the `Scheduler`. One thread, one turn after another: wait, hand every message in as an event, tick once,
carry the effects out. Decides nothing.
"""

import logging
import math
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.event_log import Recorder
from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.shell.dispatch import Outlet
from scheduler_svc.shell.peers import Credentials, DroppedFrames
from scheduler_svc.shell.router_link import RouterLink
from scheduler_svc.shell.served_model import ModelCard
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.arrays import WireError

log = logging.getLogger("tandem.core")

# Frames taken from one socket before the other gets its turn and a plan is made.
_BATCH = 1024
# After a connection ended, how long its peer is probed for: the socket learns of the end a moment after its monitor.
_PROBE_SECONDS = 1.0
_PROBE_EVERY_SECONDS = 0.005
_IDLE_SECONDS = 0.25
# How often what nothing announces is looked at: removed files, counts to log.
_LOOK_SECONDS = 1.0
# What front ends get beyond the grace to hand the last answers over.
_FAREWELL_SECONDS = 5.0


class Children(Protocol):
    """The front ends' processes, as the loop needs them."""

    def watch(self, *, restart: bool) -> None:
        """Called every turn."""
        ...

    def give_up(self, frontend: str) -> None:
        """The core lost this front end."""
        ...

    def ask_to_stop(self) -> None:
        """Let each end once its streams have; may be called again."""
        ...

    @property
    def listen(self) -> str:
        """The address that callers reach, host:port."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether one of them runs."""
        ...


class Loop:
    """Runs until `stop_asked` and no request is left, or the grace is over."""

    def __init__(
        self,
        *,
        core: Scheduler,
        workers: RouterLink,
        frontends: RouterLink,
        card: ModelCard,
        children: Children,
        credentials: Credentials,
        watch: Callable[[], None],
        recorder: Recorder | None,
        steps: StepsFile | None,
        grace_seconds: float,
        wake: socket.socket,
    ) -> None:
        """`wake` becomes readable when a signal came: a poll alone continues after one.

        `watch` is called about once a second.
        """
        self._core = core
        self._workers = workers
        self._frontends = frontends
        self._outlet = Outlet(
            workers=workers,
            frontends=frontends,
            card=card,
            steps=steps,
            listen=lambda: children.listen,
            joined=lambda: core.lanes,
        )
        self._children = children
        self._credentials = credentials
        self._watch = watch
        self._dropped = DroppedFrames()
        self._recorder = recorder
        self._grace_seconds = grace_seconds
        self._wake = wake
        self._probe_until = 0.0
        self._next_probe_at = 0.0
        self._next_look_at = 0.0
        self._drain_deadline: float | None = None
        self._poller = zmq.Poller()
        for one in (workers.socket, frontends.socket, workers.monitor, frontends.monitor, wake):
            self._poller.register(one, zmq.POLLIN)

    def run(self, stop_asked: Callable[[], int]) -> None:
        """`stop_asked` counts the requests to stop: the first drains, the second ends at once."""
        asked = 0
        while True:
            if self._wake.fileno() in dict(self._wait()):
                self._wake.recv(64)
            self._children.watch(restart=not asked)
            self._probe()
            self._look()
            effects = self._take_in()
            if (now_asked := stop_asked()) > asked:
                effects += self._begin_stop(at_once=now_asked > 1)
                asked = now_asked
            if asked and self._is_grace_over(0.0):
                effects += self._handle(ev.DrainEnded(), drain_ended=record_pb2.DrainEnded())
            effects += self._handle(ev.Tick(), tick=record_pb2.Tick())
            if self._recorder is not None:
                self._recorder.flush()
            self._outlet.carry_out(effects)
            if asked and not len(self._core.queue) and not self._outlet.lost and self._is_over():
                return

    def _wait(self) -> list[tuple[Any, int]]:
        return self._poller.poll(math.ceil(self._patience() * 1e3))

    def _patience(self) -> float:
        """Seconds until something is due although nothing comes."""
        now = time.monotonic()
        if self._outlet.lost:
            return 0.0
        until = [now + _IDLE_SECONDS]
        if (wake := self._core.next_wake()) is not None:
            until.append(wake)
        if self._drain_deadline is not None:
            # No socket reports that a front end has ended.
            until += [max(self._drain_deadline, now), now + _PROBE_EVERY_SECONDS]
        if now < self._probe_until:
            until.append(self._next_probe_at)
        return max(0.0, min(until) - now)

    # Stopping ---------------------------------------------------------------------------------------------------

    def _begin_stop(self, *, at_once: bool) -> list[fx.Effect]:
        if at_once:
            self._drain_deadline = time.monotonic()
            return []
        log.info("stopping: no new requests are admitted, running ones have %g s", self._grace_seconds)
        self._drain_deadline = time.monotonic() + self._grace_seconds
        return self._handle(ev.DrainStarted(), drain_started=record_pb2.DrainStarted())

    def _is_grace_over(self, extra_seconds: float) -> bool:
        return self._drain_deadline is not None and time.monotonic() >= self._drain_deadline + extra_seconds

    def _is_over(self) -> bool:
        """No request is left in the core; new ones are refused until the front ends have ended."""
        self._children.ask_to_stop()
        return not self._children.is_running or self._is_grace_over(_FAREWELL_SECONDS)

    # In ---------------------------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event, **entry: Any) -> list[fx.Effect]:
        """`entry` is the event as record.proto has it, written down before anything comes of it."""
        now = time.monotonic()
        if self._recorder is None:
            return self._core.handle(event, now)
        self._recorder.add_event(record_pb2.RecordedEvent(now=now, **entry))
        effects = self._core.handle(event, now)
        self._recorder.add_effects(effects)
        return effects

    def _take_in(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        while self._outlet.lost:
            effects += self._peer_lost(*self._outlet.lost.popleft())
        for peer, frame in self._workers.receive(_BATCH):
            effects += self._from_worker(peer, frame)
        for peer, frame in self._frontends.receive(_BATCH):
            effects += self._from_frontend(peer, frame)
        return effects

    def _from_worker(self, peer: str, frame: bytes | None) -> list[fx.Effect]:
        try:
            message = worker_wire.parse(_whole(frame))
            event = worker_wire.event_of(message, peer)
        except WireError as error:
            return self._refuse_worker(peer, str(error), f"it sent a malformed message: {error}")
        if not message.HasField("join"):
            return self._outlet.answer_worker(self._handle(event, peer=peer, worker=message))
        if not self._credentials.admit_worker(message.join.key):
            return self._refuse_worker(peer, self._credentials.refusal, "its key is another one")
        # Neither recorded nor kept.
        message.join.ClearField("key")
        join = worker_pb2.Join()
        join.CopyFrom(message.join)
        # What the core does not read would fill the log: a worker that stands by joins twice a second.
        message.join.ClearField("tokenizer_json")
        message.join.ClearField("chat_template")
        return self._outlet.answer_worker(self._handle(event, peer=peer, worker=message), join)

    def _refuse_worker(self, peer: str, answer: str, reason: str) -> list[fx.Effect]:
        """Drops what it sent. It is answered for its first bad frame, not for each of a flood."""
        if self._dropped.add(f"worker {peer}", reason) or peer in self._core.lanes:
            self._outlet.send(self._workers, peer, worker_wire.refused_frame(answer, retry=False))
        return self._peer_lost(self._workers, peer, reason)

    def _from_frontend(self, peer: str, frame: bytes | None) -> list[fx.Effect]:
        message = frontend_pb2.FrontendToCore()
        try:
            message = frontend_wire.parse(_whole(frame))
            self._check_frontend(peer, message)
            event = frontend_wire.event_of(message, peer)
        except WireError as error:
            self._dropped.add(f"front end {peer}", str(error))
            if message.HasField("submit") and peer in self._core.frontends:
                stream = message.submit.stream
                return [
                    fx.Rejected(frontend=peer, stream=stream, code=fx.RejectCode.INVALID, message=str(error), field="")
                ]
            return []
        return self._handle(event, peer=peer, frontend=message)

    def _check_frontend(self, peer: str, message: frontend_pb2.FrontendToCore) -> None:
        """Raises WireError if the peer has not proved that this service started it."""
        if message.HasField("hello"):
            if not self._credentials.admit_frontend(message.hello.secret):
                raise WireError("a Hello without this service's secret")
            # Not recorded.
            message.hello.ClearField("secret")
        elif peer not in self._core.frontends:
            raise WireError("a message before its Hello")

    def _peer_lost(self, link: RouterLink, peer: str, reason: str) -> list[fx.Effect]:
        lost = record_pb2.PeerLost(reason=reason)
        if link is self._workers:
            if peer not in self._core.lanes:
                return []
            return self._handle(ev.WorkerLost(worker=peer, reason=reason), peer=peer, worker_lost=lost)
        if peer not in self._core.frontends:
            return []
        if self._drain_deadline is None:
            log.warning("front end %s lost: %s", peer, reason)
        self._children.give_up(peer)
        return self._handle(ev.FrontendLost(frontend=peer), peer=peer, frontend_lost=lost)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._next_look_at:
            self._next_look_at = now + _LOOK_SECONDS
            self._watch()
            self._dropped.report(now)
            self._workers.keep_limits(self._core.lanes)

    def _probe(self) -> None:
        """Finds lost peers, for a while after any connection ended."""
        now = time.monotonic()
        if self._workers.somebody_left() | self._frontends.somebody_left():
            self._probe_until = now + _PROBE_SECONDS
        if now >= self._probe_until or now < self._next_probe_at:
            return
        # Not every turn: a peer that is slow, not gone, must not be flooded with probes.
        self._next_probe_at = now + _PROBE_EVERY_SECONDS
        for link, peers in (
            (self._workers, list(self._core.lanes)),
            (self._frontends, list(self._core.frontends)),
        ):
            for peer, reason in link.gone(peers):
                self._outlet.lost.append((link, peer, reason))


def _whole(frame: bytes | None) -> bytes:
    """The frame. Raises WireError where a message of several parts came instead."""
    if frame is None:
        raise WireError("a message of several parts")
    return frame
