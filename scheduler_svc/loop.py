"""The core's shell: sockets and clock outside, the pure scheduler inside.

Sole owner of the `Scheduler`. One thread: wait, hand every message in as an event, tick once, carry the effects out,
workers first. Decides nothing.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable

import zmq
from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2

from scheduler_svc import frontend_wire, worker_wire
from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links import PeerLostError, RouterLink
from scheduler_svc.model_card import ModelCard
from scheduler_svc.record import Recorder
from scheduler_svc.wire import WireError

log = logging.getLogger("tandem.core")

# Frames taken from one socket before the other gets its turn and a plan is made.
_BATCH = 1024
# After a connection ended, how long its peer is probed for: the socket learns of the end a moment after its monitor.
_PROBE_SECONDS = 1.0
_PROBE_EVERY_SECONDS = 0.005
_IDLE_SECONDS = 0.25


class Loop:
    """Runs until `stop` is asked for and the grace is over or nobody is left."""

    def __init__(
        self,
        *,
        core: Scheduler,
        workers: RouterLink,
        frontends: RouterLink,
        card: ModelCard,
        recorder: Recorder | None,
        grace_seconds: float,
        each_turn: Callable[[], None],
        frontend_lost: Callable[[str], None],
    ) -> None:
        self._core = core
        self._workers = workers
        self._frontends = frontends
        self._card = card
        self._recorder = recorder
        self._grace_seconds = grace_seconds
        self._each_turn = each_turn
        self._frontend_lost = frontend_lost
        # Joins whose answer is not given yet: the core keeps what it decides by, the card the rest.
        self._joins: dict[str, worker_pb2.Join] = {}
        self._lost: deque[tuple[RouterLink, str, str]] = deque()
        self._probe_until = 0.0
        self._drain_deadline: float | None = None
        self._poller = zmq.Poller()
        for socket in (workers.socket, frontends.socket, workers.monitor, frontends.monitor):
            self._poller.register(socket, zmq.POLLIN)

    def run(self, stop_asked: Callable[[], int]) -> None:
        """`stop_asked` counts the requests to stop: the first drains, the second ends at once."""
        asked = 0
        while True:
            self._poller.poll(math.ceil(self._patience() * 1e3))
            self._each_turn()
            self._probe()
            effects = self._take_in()
            if (now_asked := stop_asked()) > asked:
                effects += self._ask_stop(asked == 0, now_asked)
                asked = now_asked
            if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
                effects += self._handle(record_pb2.RecordedEvent(drain_ended=record_pb2.DrainEnded()), ev.DrainEnded())
            effects += self._handle(record_pb2.RecordedEvent(tick=record_pb2.Tick()), ev.Tick())
            self._carry_out(effects)
            if asked and not len(self._core.book) and not self._lost:
                return

    def _patience(self) -> float:
        now = time.monotonic()
        until = [now + _IDLE_SECONDS]
        if self._lost:
            return 0.0
        if (wake := self._core.next_wake()) is not None:
            until.append(wake)
        if self._drain_deadline is not None:
            until.append(self._drain_deadline)
        if now < self._probe_until:
            until.append(now + _PROBE_EVERY_SECONDS)
        return max(0.0, min(until) - now)

    def _ask_stop(self, first: bool, asked: int) -> list[fx.Effect]:
        if not first or asked > 1:
            self._drain_deadline = time.monotonic()
            return []
        log.info("stopping: admitting nobody, running requests have %g s", self._grace_seconds)
        self._drain_deadline = time.monotonic() + self._grace_seconds
        return self._handle(record_pb2.RecordedEvent(drain_started=record_pb2.DrainStarted()), ev.DrainStarted())

    # In ---------------------------------------------------------------------------------------------------------

    def _handle(self, entry: record_pb2.RecordedEvent, event: ev.Event) -> list[fx.Effect]:
        now = time.monotonic()
        effects = self._core.handle(event, now)
        if self._recorder is not None:
            entry.now = now
            self._recorder.add(entry, effects)
        return effects

    def _take_in(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        while self._lost:
            effects += self._peer_lost(*self._lost.popleft())
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
            self._try_send(self._workers, peer, worker_wire.refused_frame(str(error), retry=False))
            return self._peer_lost(self._workers, peer, f"it sent what is no message: {error}")
        if message.HasField("join"):
            self._joins[peer] = message.join
        return self._handle(record_pb2.RecordedEvent(peer=peer, worker=message), event)

    def _from_frontend(self, peer: str, frame: bytes) -> list[fx.Effect]:
        try:
            message = frontend_wire.parse(frame)
            event = frontend_wire.event_of(message, peer)
        except WireError as error:
            log.warning("front end %s: dropped what it sent: %s", peer, error)
            return []
        return self._handle(record_pb2.RecordedEvent(peer=peer, frontend=message), event)

    def _peer_lost(self, link: RouterLink, peer: str, reason: str) -> list[fx.Effect]:
        lost = record_pb2.PeerLost(reason=reason)
        if link is self._workers:
            self._joins.pop(peer, None)
            event = ev.WorkerLost(worker=peer, reason=reason)
            return self._handle(record_pb2.RecordedEvent(peer=peer, worker_lost=lost), event)
        if peer in self._core.frontends:
            log.warning("front end %s lost: %s", peer, reason)
            self._frontend_lost(peer)
        return self._handle(record_pb2.RecordedEvent(peer=peer, frontend_lost=lost), ev.FrontendLost(frontend=peer))

    def _probe(self) -> None:
        """Finds out who is gone, for a while after any connection ended."""
        now = time.monotonic()
        if self._workers.somebody_left() | self._frontends.somebody_left():
            self._probe_until = now + _PROBE_SECONDS
        if now >= self._probe_until:
            return
        lane = self._core.lane
        for link, peers in (
            (self._workers, [lane.worker] if lane else []),
            (self._frontends, list(self._core.frontends)),
        ):
            for peer in link.gone(peers):
                self._lost.append((link, peer, "its connection is gone"))

    # Out --------------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[fx.Effect]) -> None:
        """Workers first: the device must not wait for anybody's text."""
        later: list[frontend_wire.FrontendEffect | fx.ModelServed] = []
        for effect in effects:
            match effect:
                case fx.SendPlan():
                    self._try_send(self._workers, effect.worker, worker_wire.plan_frame(effect.plan))
                case fx.WorkerAccepted():
                    self._accept(effect)
                case fx.WorkerRefused():
                    self._joins.pop(effect.worker, None)
                    frame = worker_wire.refused_frame(effect.reason, retry=effect.retry)
                    self._try_send(self._workers, effect.worker, frame)
                case fx.AskRejoin():
                    self._try_send(self._workers, effect.worker, worker_wire.rejoin_frame())
                case fx.Note():
                    log.warning("%s", effect.message)
                case _:
                    later.append(effect)
        for effect in later:
            self._try_send(self._frontends, effect.frontend, self._frontend_frame(effect))

    def _accept(self, effect: fx.WorkerAccepted) -> None:
        join = self._joins.pop(effect.worker)
        self._card.take(join)
        log.info(
            "worker %s serves %s on %s (%s): %d pages of %d, %d rows",
            effect.worker, join.model, join.device, join.dtype, join.num_pages - 1, join.page_size, join.max_rows,
        )  # fmt: skip
        self._try_send(self._workers, effect.worker, worker_wire.joined_frame(effect.generation))

    def _frontend_frame(self, effect: frontend_wire.FrontendEffect | fx.ModelServed) -> bytes:
        if not isinstance(effect, fx.ModelServed):
            return frontend_wire.frame_of(effect)
        state = frontend_pb2.ModelState(ready=False) if effect.info is None else self._card.state()
        return frontend_pb2.CoreToFrontend(model_state=state).SerializeToString()

    def _try_send(self, link: RouterLink, peer: str, frame: bytes) -> None:
        try:
            link.send(peer, frame)
        except PeerLostError as error:
            self._lost.append((link, peer, str(error)))
