"""Turns frames of workers and front ends into events of the core.

Owns the workers' key, the front ends' secret, and the table of peers that sent frames which were dropped: malformed
ones, and those of a sender that did not prove that it belongs to this service. A peer that can no longer be reached
becomes an event too.
"""

import hmac
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.door.token_file import TokenFile
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.remote import as_guest
from scheduler_svc.shell.dispatch import EffectDispatcher
from scheduler_svc.shell.links import RouterLink, link_of
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import tenants as tenants_wire
from scheduler_svc.wire import worker as worker_wire
from tandem_contract.bounds import WireError
from tandem_contract.codec import parsed
from tandem_contract.plural import numbered

log = logging.getLogger("tandem.core")

_REPORT_SECONDS = 10.0
# Peers named in the log between two reports; frames of others are counted together.
_MAX_NAMED = 16


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Credentials:
    """The worker key and the front-end secret, compared in constant time, never logged or recorded."""

    worker_key: bytes
    key_path: Path
    frontend_secret: bytes

    def is_worker_key(self, key: bytes) -> bool:
        """Whether this is the key of the runtime folder, so that a Join with it is accepted."""
        return hmac.compare_digest(key, self.worker_key)

    def is_frontend_secret(self, secret: bytes) -> bool:
        """Whether this is the secret of this service, so that a Hello with it comes from a process that it started."""
        return hmac.compare_digest(secret, self.frontend_secret)

    @property
    def refusal(self) -> str:
        """The answer to a worker with a wrong key."""
        return (
            f"its key is not the one in {self.key_path}: the file was replaced after the worker read it, or the "
            "worker uses another folder; start the worker again with the scheduler's runtime_dir"
        )


class DroppedFrames:
    """Counts dropped frames per peer. Peers that connect under new names cost neither memory nor log lines."""

    def __init__(self) -> None:
        self.total = 0
        self._unreported: Counter[str] = Counter()
        self._others = 0
        self._report_at = 0.0

    def add(self, peer: str, reason: str) -> bool:
        """Counts one frame. Returns True if it is logged: the peer's first one since the last report."""
        self.total += 1
        if peer in self._unreported:
            self._unreported[peer] += 1
        elif len(self._unreported) < _MAX_NAMED:
            self._unreported[peer] = 0
            log.warning("%s: dropped a frame: %s", peer, reason)
            return True
        else:
            self._others += 1
        return False

    def report(self, now: float) -> None:
        """Logs every ten seconds how many more frames were dropped, and clears the table. Call it once a second."""
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_SECONDS
        more = self._unreported.total() + self._others
        if more:
            peer, count = self._unreported.most_common(1)[0]
            log.warning(
                "dropped %s in %g s; most came from %s: %d",
                *(numbered(more, "more frame"), _REPORT_SECONDS, peer, count),
            )
        self._unreported.clear()
        self._others = 0


# Frames read from one socket before the other gets its turn and the core makes a plan.
_MAX_FRAMES_PER_TURN = 1024


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Inbound:
    """Reads both links and passes events to the core; returns the effects that are still to be dispatched."""

    core: Scheduler
    # Passes an event to the core (`Loop`).
    handle: Callable[..., list[fx.Effect]]
    dispatcher: EffectDispatcher
    credentials: Credentials
    # Gets a front end, the reason, and whether it has announced its stop.
    on_frontend_lost: Callable[[str, str, bool], None]
    tokens: TokenFile | None
    metrics: CoreMeter | None = None
    dropped: DroppedFrames = field(default_factory=DroppedFrames, init=False)
    _leaving: set[str] = field(default_factory=set[str], init=False)

    def receive(self) -> list[fx.Effect]:
        """Handles lost peers, then at most 1,024 frames of each link."""
        effects: list[fx.Effect] = []
        while self.dispatcher.lost_peers:
            effects += self._peer_lost(*self.dispatcher.lost_peers.popleft())
        for link in self.dispatcher.workers:
            for peer, frame in link.receive(_MAX_FRAMES_PER_TURN):
                # Another process of this user could give itself the name of a remote worker.
                if link is link_of(peer, self.dispatcher.workers):
                    effects += self._from_worker(link, peer, frame)
        for peer, frame in self.dispatcher.frontends.receive(_MAX_FRAMES_PER_TURN):
            effects += self._from_frontend(peer, frame)
        return effects

    def _from_worker(self, link: RouterLink, peer: str, frame: bytes | None) -> list[fx.Effect]:
        try:
            data = _whole(frame)
            message = parsed(worker_pb2.WorkerToCore, data)
            host = link.host_of(peer)
            if host and message.HasField("join"):
                as_guest(message.join, peer)
            event = worker_wire.event_of(message, peer)
        except WireError as error:
            return self._refuse_worker(link, peer, str(error), f"it sent a malformed message: {error}")
        if not message.HasField("join"):
            return self.dispatcher.answer_worker(self.handle(event, peer=peer, worker=data))
        # CURVE has authenticated a worker on another host.
        if not host and not self.credentials.is_worker_key(message.join.key):
            return self._refuse_worker(link, peer, self.credentials.refusal, "it sent a wrong key")
        # The key is neither recorded nor kept.
        message.join.ClearField("key")
        join = worker_pb2.Join()
        join.CopyFrom(message.join)
        # The core does not read these; they would fill the log, because a standby worker joins twice a second.
        message.join.ClearField("tokenizer_json")
        message.join.ClearField("chat_template")
        message.join.ClearField("chat")
        return self.dispatcher.answer_worker(self.handle(event, peer=peer, worker=message.SerializeToString()), join)

    def _refuse_worker(self, link: RouterLink, peer: str, answer: str, reason: str) -> list[fx.Effect]:
        """Drops the frame. An unknown worker is answered for the first one that is logged, not for each of a flood."""
        if self.dropped.add(f"worker {peer}", reason) or peer in self.core.lanes:
            self.dispatcher.order(peer, fx.WorkerRefused(worker=peer, reason=answer, retry=False))
        return self._peer_lost(link, peer, reason)

    def _from_frontend(self, peer: str, frame: bytes | None) -> list[fx.Effect]:
        message = frontend_pb2.FrontendToCore()
        try:
            data = _whole(frame)
            message = parsed(frontend_pb2.FrontendToCore, data)
            self._check_frontend(peer, message)
            if message.HasField("metrics"):
                # Neither the core nor its event log reads it.
                if self.metrics is not None:
                    self.metrics.fronts.take(peer, message.metrics)
                return []
            if message.HasField("leaving"):
                self._leaving.add(peer)
                return []
            event = frontend_wire.event_of(message, peer)
            if message.HasField("hello"):
                # Without the secret.
                data = message.SerializeToString()
                self.send_tenants([peer])
        except WireError as error:
            self.dropped.add(f"front end {peer}", str(error))
            kind = message.WhichOneof("message")
            if kind in ("submit", "resume") and peer in self.core.frontends:
                stream = getattr(message, kind).stream
                return [
                    fx.Rejected(frontend=peer, stream=stream, code=fx.RejectCode.INVALID, message=str(error), field="")
                ]
            return []
        return self.handle(event, peer=peer, frontend=data)

    def send_tenants(self, frontends: Iterable[str]) -> None:
        """Sends the content of the token file, if there is one."""
        if self.tokens is None:
            return
        message = frontend_pb2.CoreToFrontend(tenants=tenants_wire.message_of(self.tokens.tenants))
        frame = message.SerializeToString()
        for frontend in frontends:
            self.dispatcher.send(self.dispatcher.frontends, frontend, frame)

    def _check_frontend(self, peer: str, message: frontend_pb2.FrontendToCore) -> None:
        """Raises WireError if the peer has not proved that this service started it."""
        if message.HasField("hello"):
            if not self.credentials.is_frontend_secret(message.hello.secret):
                raise WireError("its Hello does not have the secret of this service")
            # The secret is not recorded.
            message.hello.ClearField("secret")
        elif peer not in self.core.frontends:
            raise WireError("it sent a message before its Hello")

    def _peer_lost(self, link: RouterLink, peer: str, reason: str) -> list[fx.Effect]:
        lost = record_pb2.PeerLost(reason=reason)
        if link is not self.dispatcher.frontends:
            if peer not in self.core.lanes:
                return []
            return self.handle(ev.WorkerLost(worker=peer, reason=reason), peer=peer, worker_lost=lost)
        if peer not in self.core.frontends:
            return []
        is_orderly = peer in self._leaving
        self._leaving.discard(peer)
        self.on_frontend_lost(peer, reason, is_orderly)
        return self.handle(ev.FrontendLost(frontend=peer, is_orderly=is_orderly), peer=peer, frontend_lost=lost)


def _whole(frame: bytes | None) -> bytes:
    """Returns the frame. Raises WireError if the message had several parts."""
    if frame is None:
        raise WireError("the message has several parts")
    return frame
