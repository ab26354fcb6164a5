"""Turns frames of workers and front ends into events of the core. Owns the count of dropped frames.

A frame is dropped if it is malformed or its sender did not prove that it belongs to this service. A peer that can no
longer be reached becomes an event too.
"""

from collections.abc import Callable, Iterable

from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.door.token_file import TokenFile
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.remote import as_guest
from scheduler_svc.shell.dispatch import EffectDispatcher
from scheduler_svc.shell.peers import Credentials, DroppedFrames
from scheduler_svc.shell.router_link import RouterLink
from scheduler_svc.shell.worker_links import WorkersLink
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import tenants as tenants_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.arrays import WireError, parsed

# Frames read from one socket before the other gets its turn and the core makes a plan.
_MAX_FRAMES_PER_TURN = 1024


class Inbound:
    """Reads both links and passes events to the core; returns the effects that are still to be dispatched."""

    def __init__(
        self,
        *,
        core: Scheduler,
        handle: Callable[..., list[fx.Effect]],
        workers: WorkersLink,
        frontends: RouterLink,
        dispatcher: EffectDispatcher,
        credentials: Credentials,
        on_frontend_lost: Callable[[str, str], None],
        tokens: TokenFile | None,
        metrics: CoreMeter | None = None,
    ) -> None:
        """`handle` passes an event to the core (`Loop`); `on_frontend_lost` gets a front end and the reason."""
        self.dropped = DroppedFrames()
        self._core = core
        self._handle = handle
        self._workers = workers
        self._frontends = frontends
        self._dispatcher = dispatcher
        self._credentials = credentials
        self._on_frontend_lost = on_frontend_lost
        self._tokens = tokens
        self._metrics = metrics

    def receive(self) -> list[fx.Effect]:
        """Handles lost peers, then at most 1,024 frames of each link."""
        effects: list[fx.Effect] = []
        while self._dispatcher.lost_peers:
            effects += self._peer_lost(*self._dispatcher.lost_peers.popleft())
        for peer, frame in self._workers.receive(_MAX_FRAMES_PER_TURN):
            effects += self._from_worker(peer, frame)
        for peer, frame in self._frontends.receive(_MAX_FRAMES_PER_TURN):
            effects += self._from_frontend(peer, frame)
        return effects

    def _from_worker(self, peer: str, frame: bytes | None) -> list[fx.Effect]:
        try:
            message = parsed(worker_pb2.WorkerToCore, _whole(frame))
            host = self._workers.host_of(peer)
            if host and message.HasField("join"):
                as_guest(message.join, peer)
            event = worker_wire.event_of(message, peer)
        except WireError as error:
            return self._refuse_worker(peer, str(error), f"it sent a malformed message: {error}")
        if self._metrics is not None and isinstance(event, ev.StepDone):
            self._metrics.step_arrived(event, self._core)
        if not message.HasField("join"):
            return self._dispatcher.answer_worker(self._handle(event, peer=peer, worker=message))
        # CURVE has authenticated a worker on another host.
        if not host and not self._credentials.is_worker_key(message.join.key):
            return self._refuse_worker(peer, self._credentials.refusal, "it sent a wrong key")
        # The key is neither recorded nor kept.
        message.join.ClearField("key")
        join = worker_pb2.Join()
        join.CopyFrom(message.join)
        # The core does not read these; they would fill the log, because a standby worker joins twice a second.
        message.join.ClearField("tokenizer_json")
        message.join.ClearField("chat_template")
        message.join.ClearField("chat")
        return self._dispatcher.answer_worker(self._handle(event, peer=peer, worker=message), join)

    def _refuse_worker(self, peer: str, answer: str, reason: str) -> list[fx.Effect]:
        """Drops the frame. An unknown worker is answered for the first one that is logged, not for each of a flood."""
        if self.dropped.add(f"worker {peer}", reason) or peer in self._core.lanes:
            self._dispatcher.send(self._workers, peer, worker_wire.refused_frame(answer, retry=False))
        return self._peer_lost(self._workers, peer, reason)

    def _from_frontend(self, peer: str, frame: bytes | None) -> list[fx.Effect]:
        message = frontend_pb2.FrontendToCore()
        try:
            message = parsed(frontend_pb2.FrontendToCore, _whole(frame))
            self._check_frontend(peer, message)
            if message.HasField("metrics"):
                # Neither the core nor its event log reads it.
                if self._metrics is not None:
                    self._metrics.reported(peer, message.metrics)
                return []
            event = frontend_wire.event_of(message, peer)
        except WireError as error:
            self.dropped.add(f"front end {peer}", str(error))
            kind = message.WhichOneof("message")
            if kind in ("submit", "resume") and peer in self._core.frontends:
                stream = getattr(message, kind).stream
                return [
                    fx.Rejected(frontend=peer, stream=stream, code=fx.RejectCode.INVALID, message=str(error), field="")
                ]
            return []
        if message.HasField("hello"):
            self.send_tenants([peer])
        return self._handle(event, peer=peer, frontend=message)

    def send_tenants(self, frontends: Iterable[str]) -> None:
        """Sends the content of the token file, if there is one."""
        if self._tokens is None:
            return
        message = frontend_pb2.CoreToFrontend(tenants=tenants_wire.message_of(self._tokens.tenants))
        frame = message.SerializeToString()
        for frontend in frontends:
            self._dispatcher.send(self._frontends, frontend, frame)

    def _check_frontend(self, peer: str, message: frontend_pb2.FrontendToCore) -> None:
        """Raises WireError if the peer has not proved that this service started it."""
        if message.HasField("hello"):
            if not self._credentials.is_frontend_secret(message.hello.secret):
                raise WireError("its Hello does not have the secret of this service")
            # The secret is not recorded.
            message.hello.ClearField("secret")
        elif peer not in self._core.frontends:
            raise WireError("it sent a message before its Hello")

    def _peer_lost(self, link: WorkersLink, peer: str, reason: str) -> list[fx.Effect]:
        lost = record_pb2.PeerLost(reason=reason)
        if link is self._workers:
            if peer not in self._core.lanes:
                return []
            return self._handle(ev.WorkerLost(worker=peer, reason=reason), peer=peer, worker_lost=lost)
        if peer not in self._core.frontends:
            return []
        self._on_frontend_lost(peer, reason)
        return self._handle(ev.FrontendLost(frontend=peer), peer=peer, frontend_lost=lost)


def _whole(frame: bytes | None) -> bytes:
    """Returns the frame. Raises WireError if the message had several parts."""
    if frame is None:
        raise WireError("the message has several parts")
    return frame
