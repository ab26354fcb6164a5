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

from scheduler_svc import frontend_wire, worker_wire
from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links import RouterLink
from scheduler_svc.model_card import ModelCard
from scheduler_svc.outlet import Outlet
from scheduler_svc.record import Recorder
from scheduler_svc.steps import StepsFile
from scheduler_svc.wire import WireError

log = logging.getLogger("tandem.core")

# Frames taken from one socket before the other gets its turn and a plan is made.
_BATCH = 1024
# After a connection ended, how long its peer is probed for: the socket learns of the end a moment after its monitor.
_PROBE_SECONDS = 1.0
_PROBE_EVERY_SECONDS = 0.005
_IDLE_SECONDS = 0.25
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
    """Runs until `stop_asked` and nobody is left, or the grace is over."""

    def __init__(
        self,
        *,
        core: Scheduler,
        workers: RouterLink,
        frontends: RouterLink,
        card: ModelCard,
        children: Children,
        recorder: Recorder | None,
        steps: StepsFile | None,
        grace_seconds: float,
        wake: socket.socket,
    ) -> None:
        """`wake` becomes readable when a signal came: a poll alone goes on after one."""
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
        self._recorder = recorder
        self._grace_seconds = grace_seconds
        self._wake = wake
        self._probe_until = 0.0
        self._next_probe_at = 0.0
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
            if asked and not len(self._core.book) and not self._outlet.lost and self._is_over():
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
            # Then also the front ends' end is waited for, which no socket tells.
            until += [max(self._drain_deadline, now), now + _PROBE_EVERY_SECONDS]
        if now < self._probe_until:
            until.append(self._next_probe_at)
        return max(0.0, min(until) - now)

    # Stopping ---------------------------------------------------------------------------------------------------

    def _begin_stop(self, *, at_once: bool) -> list[fx.Effect]:
        if at_once:
            self._drain_deadline = time.monotonic()
            return []
        log.info("stopping: admitting nobody, running requests have %g s", self._grace_seconds)
        self._drain_deadline = time.monotonic() + self._grace_seconds
        return self._handle(ev.DrainStarted(), drain_started=record_pb2.DrainStarted())

    def _is_grace_over(self, extra_seconds: float) -> bool:
        return self._drain_deadline is not None and time.monotonic() >= self._drain_deadline + extra_seconds

    def _is_over(self) -> bool:
        """Nobody is left in the core; whoever still comes is turned away until the front ends have ended."""
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

    def _from_worker(self, peer: str, frame: bytes) -> list[fx.Effect]:
        try:
            message = worker_wire.parse(frame)
            event = worker_wire.event_of(message, peer)
        except WireError as error:
            log.warning("worker %s: dropped what it sent: %s", peer, error)
            self._outlet.send(self._workers, peer, worker_wire.refused_frame(str(error), retry=False))
            return self._peer_lost(self._workers, peer, f"it sent what is no message: {error}")
        if not message.HasField("join"):
            return self._outlet.answer_worker(self._handle(event, peer=peer, worker=message))
        join = worker_pb2.Join()
        join.CopyFrom(message.join)
        # What the core does not read would fill the log: a worker that stands by joins twice a second.
        message.join.ClearField("tokenizer_json")
        message.join.ClearField("chat_template")
        return self._outlet.answer_worker(self._handle(event, peer=peer, worker=message), join)

    def _from_frontend(self, peer: str, frame: bytes) -> list[fx.Effect]:
        message = frontend_pb2.FrontendToCore()
        try:
            message = frontend_wire.parse(frame)
            event = frontend_wire.event_of(message, peer)
        except WireError as error:
            log.warning("front end %s: dropped what it sent: %s", peer, error)
            if message.HasField("submit"):
                stream = message.submit.stream
                return [
                    fx.Rejected(frontend=peer, stream=stream, code=fx.RejectCode.INVALID, message=str(error), field="")
                ]
            return []
        return self._handle(event, peer=peer, frontend=message)

    def _peer_lost(self, link: RouterLink, peer: str, reason: str) -> list[fx.Effect]:
        lost = record_pb2.PeerLost(reason=reason)
        if link is self._workers:
            return self._handle(ev.WorkerLost(worker=peer, reason=reason), peer=peer, worker_lost=lost)
        if peer in self._core.frontends:
            if self._drain_deadline is None:
                log.warning("front end %s lost: %s", peer, reason)
            self._children.give_up(peer)
        return self._handle(ev.FrontendLost(frontend=peer), peer=peer, frontend_lost=lost)

    def _probe(self) -> None:
        """Finds out who is gone, for a while after any connection ended."""
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
