"""Owns the process's parts and their lifetime: the link to the core, servicers, gRPC servers, and draining.

Knows nothing of requests. This module connects the parts to each other.

A front end may have a second address: grpc.health.v1 alone, in plaintext, for probes and proxies. Everyone may call it,
so it has few connections, watches and calls of its own, and its callers take none of the others'.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import grpc
import grpc.aio
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.door.tls_files import FollowedFiles, TlsContent, TlsFileError, TlsFiles
from scheduler_svc.frontend import methods, model
from scheduler_svc.frontend.chat.forms import AnswerForm
from scheduler_svc.frontend.constraints.door import ConstraintDoor
from scheduler_svc.frontend.control import ControlServicer, CoreQueries
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.entrance import Entrance
from scheduler_svc.frontend.grpc_tuning.call_lines import Lines, server_with_lines
from scheduler_svc.frontend.grpc_tuning.event_loop import patient_threads
from scheduler_svc.frontend.grpc_tuning.tuning import ON, Tuning
from scheduler_svc.frontend.readiness import HealthServicer, Readiness
from scheduler_svc.frontend.request_log import RequestLog
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.calls import MAX_SMALL_BYTES, CallLimits, Calls
from scheduler_svc.frontend.rpc.options import allow_connections, server_options
from scheduler_svc.frontend.servicer import InferenceServicer
from scheduler_svc.frontend.streaming.stream import StreamLimits
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from scheduler_svc.frontend.watching import end_revoked, stalled
from scheduler_svc.metrics.front_meter import FrontMeter
from scheduler_svc.processes import address
from scheduler_svc.processes.frontends import FrontEndSettings
from tandem_contract.plural import numbered
from tandem_contract.stopping import STOP, leave_to_parent

logger = logging.getLogger(__name__)


def _credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """The credentials of a server. Raises TlsFileError."""

    def configuration(content: TlsContent) -> Any:
        pair = (content.key, content.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=content.client_ca)

    followed = FollowedFiles(files, configuration)
    make = cast(Any, grpc).dynamic_ssl_server_credentials
    return make(
        followed.value,
        # The configuration for this handshake and the next ones; None if it is as before.
        lambda: followed.value if followed.look() else None,
        require_client_authentication=files.client_ca is not None,
    )


MAX_CONNECTIONS = 128
MAX_WATCHES = 128
_LIMITS = CallLimits(max_without_message_reserved=128, answer_seconds=10.0, max_unread_reserved=128)


class HealthListener:
    """The second server. `health` is its servicer; the owner sets its state. Make it before the process serves."""

    def __init__(self, listen: str, *, share_port: bool, tuning: Tuning) -> None:
        self.health = HealthServicer(MAX_WATCHES)
        self._listen = listen
        # The port that was bound; 0 before the start.
        self.port = 0
        self._calls = Calls(_LIMITS, is_shared=False, tuning=tuning)
        options = server_options(
            max_message_bytes=MAX_SMALL_BYTES, share_port=share_port, max_connections=MAX_CONNECTIONS
        )
        self._server = grpc.aio.server(options=options)
        methods.add_health(self._server, self._calls, self.health)

    async def start(self) -> None:
        """Listens. Raises address.ListenError."""
        host, port = address.split(self._listen, missing=(), flag="--health-listen")
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise address.taken(self._listen, flag="--health-listen") from None
        await self._server.start()

    def sweep(self) -> None:
        """Ends calls that take too long. The owner calls this about once a second."""
        self._calls.sweep(stalled(self.health.watches, _LIMITS.answer_seconds))

    async def stop(self, grace_seconds: float) -> None:
        await self._server.stop(grace_seconds)


SWEEP_SECONDS = 1.0
# The grace for what remains after the last stream has ended: health watches and answers that are being sent.
STOP_SECONDS = 0.5
_MOMENT_SECONDS = 0.25


class FrontEnd:
    def __init__(
        self,
        settings: FrontEndSettings,
        *,
        tuning: Tuning = ON,
        answers: AnswerForm | None = None,
        stream_limits: StreamLimits | None = None,
        call_limits: CallLimits | None = None,
    ) -> None:
        """`answers`: how those of chats are parsed, instead of as the checkpoint or its template says."""
        self._settings, self._tuning, self._answers = settings, tuning, answers
        self._call_limits = call_limits or CallLimits()
        self._link = CoreLink(settings.endpoint, settings.secret)
        self._health = HealthServicer()
        self._entrance = Entrance(needs_tokens=settings.needs_tokens)
        max_connections = allow_connections()
        self._probes: HealthListener | None = None
        with patient_threads(is_on=tuning.wakeups):
            if settings.health_listen:
                self._probes = HealthListener(settings.health_listen, share_port=settings.share_port, tuning=tuning)
        self._readiness = Readiness(self._health, *([self._probes.health] if self._probes else []))
        self._calls = Calls(self._call_limits, is_shared=settings.needs_tokens, tuning=tuning)
        self._streams = StreamTable(
            self._link.send,
            stream_limits or StreamLimits(max_streams=settings.max_streams),
            self._calls.unread,
            self._readiness.requests,
            self._readiness.on_their_way,
            is_shared=settings.needs_tokens,
        )
        self._queries = CoreQueries(self._link.send)
        self._meter = FrontMeter() if settings.measures else None
        self._constraints = ConstraintDoor(self._meter)
        self._request_log = RequestLog(settings.log_requests, self._meter)
        self._server = self._make_server(max_connections)
        # Set when it shall end: with its streams, or after this many seconds.
        self._stop, self._grace_seconds = asyncio.Event(), settings.grace_seconds
        self._core_drains = False
        # Ends this front end alone, because it got a signal that is not its parent's.
        self._leaving: asyncio.Task[None] | None = None
        # The newest model state that is not loaded yet: workers of other sizes may join while one is loaded.
        self._next_state: frontend_pb2.ModelState | None = None
        self._loading: asyncio.Task[None] | None = None

    async def run(self, on_listening: Callable[[str], None]) -> None:
        """Serves until `stop` is called and the streams have ended. Raises address.ListenError.

        Calls `on_listening` with the address, which contains the port that was bound.
        """
        bound = self._bind()
        await self._server.start()
        if self._probes is not None:
            await self._probes.start()
        link = asyncio.create_task(self._link.run(self._on_message, self._on_lost))
        sweep = asyncio.create_task(self._sweep())
        stop = asyncio.create_task(self._wait_until_drained())
        on_listening(bound)
        try:
            ended, _ = await asyncio.wait([link, sweep, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            await asyncio.gather(*(one.stop(STOP_SECONDS) for one in (self._server, self._probes) if one is not None))
            self._report()
            self._readiness.lose_core()
            tasks = [task for task in (link, sweep, stop, self._leaving) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._constraints.close()

    def stop(self) -> None:
        """Takes no more requests, and ends when the running ones have ended or the grace period is over."""
        if not self._stop.is_set():
            self._refuse()
        self._stop.set()

    def stop_on_signals(self) -> None:
        """Stops when the parent asks for it, and on SIGTERM. A terminal's SIGINT is the parent's business alone."""
        loop = asyncio.get_running_loop()
        leave_to_parent()
        loop.add_signal_handler(STOP, self.stop)
        loop.add_signal_handler(signal.SIGTERM, self._leave)

    def _leave(self) -> None:
        """This process alone is asked to stop, or every process of the service."""
        if self._leaving is None and not self._core_drains and not self._stop.is_set():
            self._refuse()
            self._link.send(frontend_pb2.FrontendToCore(leaving=frontend_pb2.Leaving()))
            self._leaving = asyncio.create_task(self._stop_alone())

    async def _stop_alone(self) -> None:
        """Stops when the streams have ended, unless the core drains too: then the parent says when to stop."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._grace_seconds
        # The core may have got the same signal, and says so in a moment.
        await asyncio.sleep(_MOMENT_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await self._streams.wait_idle()
        if not self._core_drains:
            self._grace_seconds = max(0.0, ends_at - loop.time())
            self._stop.set()

    def _refuse(self) -> None:
        streams = numbered(self._streams.num_open, "stream", "have")
        logger.info("stopping: new requests are refused; %s at most %g s to end", streams, self._grace_seconds)
        self._readiness.drain()

    def _on_message(self, message: frontend_pb2.CoreToFrontend) -> None:
        match message.WhichOneof("message"):
            case "step_output" | "admitted" | "rejected" | "resumed" | "waits" | "replaced" as kind:
                getattr(self._streams, kind)(getattr(message, kind))
            case "model_state":
                self._take_model(message.model_state)
            case "core_status":
                self._readiness.set_core_status(message.core_status)
            case "tenants":
                self._entrance.take(message.tenants)
            case "batch":
                for one in message.batch.messages:
                    self._on_message(one)
            case "draining":
                logger.info("the core is shutting down: no new requests")
                self._core_drains = True
                self._readiness.drain()
            case str(kind) if kind.endswith("_reply"):
                self._queries.answer(getattr(message, kind))
            case _:
                logger.error("the core sent a message that this front end does not know")

    def _on_lost(self) -> None:
        """Fails everything that waits for the core. The front end serves again when it has a new core."""
        if self._loading is not None:
            self._loading.cancel()
        self._next_state = self._loading = None
        if self._meter is not None:
            self._meter.connection_lost()
        self._readiness.lose_core()
        self._streams.fail_all(lambda: status.not_ready("the scheduler's core is gone", reason="core_lost"))
        self._queries.fail_all()

    def _bind(self) -> str:
        listen = self._settings.listen
        has_tls = self._settings.tls is not None
        missing = address.missing_flags(has_tls=has_tls, has_tokens=self._settings.needs_tokens)
        host, port = address.split(listen, missing=missing)
        try:
            if self._settings.tls is None:
                bound_port = self._server.add_insecure_port(f"{host}:{port}")
            else:
                bound_port = self._server.add_secure_port(f"{host}:{port}", _credentials(self._settings.tls))
        except RuntimeError:
            raise address.taken(listen) from None
        except TlsFileError as error:
            raise address.ListenError(str(error)) from None
        return f"{host}:{bound_port}"

    def _take_model(self, state: frontend_pb2.ModelState) -> None:
        if not state.ready:
            return
        self._next_state = state
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        """Loads one state after another, so that the newest one is served in the end."""
        while self._next_state is not None:
            state, self._next_state = self._next_state, None
            try:
                served = await asyncio.to_thread(model.load, state, self._readiness.served, self._answers)
            except Exception:
                logger.exception("the model that the core serves cannot be loaded")
                continue
            logger.info("serving %s, up to %s a sequence", served.info.model, numbered(served.info.max_length, "token"))
            self._readiness.set_model(served)

    async def _wait_until_drained(self) -> None:
        await self._stop.wait()
        try:
            async with asyncio.timeout(self._grace_seconds):
                await self._streams.wait_idle()
        except TimeoutError:
            logger.warning("the grace period ended while %s open", numbered(self._streams.num_open, "stream", "were"))
            over = f"the service is shutting down and its grace period of {self._settings.grace_seconds:g} s is over"
            self._streams.fail_all(lambda: status.not_ready(over, reason="shutdown"))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._streams.drop_stalled()
            self._report()
            self._request_log.report(asyncio.get_running_loop().time())
            watches = [*self._health.watches, *self._queries.watches]
            if self._settings.needs_tokens:
                self._streams.end_revoked(self._entrance.is_revoked)
                end_revoked(watches, self._entrance.is_revoked)
            if self._probes is not None:
                self._probes.sweep()
            self._calls.sweep(stalled(watches, self._call_limits.answer_seconds))

    def _report(self) -> None:
        """Sends the core what was measured since the start of this process."""
        if self._meter is not None:
            report = self._meter.report(self._streams.backlog_bytes)
            self._link.send(frontend_pb2.FrontendToCore(metrics=report))

    def _make_server(self, max_connections: int) -> grpc.aio.Server:
        settings = self._settings
        options = server_options(
            max_message_bytes=settings.max_message_bytes,
            share_port=settings.share_port,
            max_connections=max_connections,
        )
        lines: Lines = {}
        with patient_threads(is_on=self._tuning.wakeups):
            server = server_with_lines(options, lines) if self._tuning.lines else grpc.aio.server(options=options)
        limit = settings.max_message_bytes
        inference = InferenceServicer(
            self._readiness,
            self._streams,
            self._constraints,
            max_message_bytes=limit,
            tuning=self._tuning,
            meter=self._meter,
        )
        control = ControlServicer(self._readiness, self._queries, max_message_bytes=limit)
        log = self._request_log
        lines |= methods.add_to_server(server, self._calls, self._entrance, inference, control, self._health, log)
        if settings.reflection:
            methods.add_reflection(server, self._calls, self._entrance)
        methods.add_unknown(server, self._calls)
        return server
