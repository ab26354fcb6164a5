"""Owns the process's parts and their order of life: link to the core, servicers, gRPC server, draining.

Knows nothing of requests; here the parts are put together.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.frontend import listen, methods, model
from scheduler_svc.frontend.control import ControlServicer, CoreQueries
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.readiness import SERVICES, Readiness
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.calls import CallLimits, Calls
from scheduler_svc.frontend.rpc.options import allow_connections, server_options
from scheduler_svc.frontend.servicer import InferenceServicer
from scheduler_svc.frontend.streaming.stream_table import StreamLimits, StreamTable

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
# What remains after the last stream ended: health watchers, answers on their way.
STOP_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndSettings:
    """What the parent process says."""

    endpoint: str
    listen: str
    share_port: bool
    reflection: bool
    max_message_bytes: int
    grace_seconds: float
    limits: StreamLimits
    call_limits: CallLimits = field(default_factory=CallLimits)
    # What proves to the core that this process is its front end.
    secret: bytes = field(default=b"", repr=False)


class FrontEnd:
    """One front end. Also the listener of its link to the core."""

    def __init__(self, settings: FrontEndSettings) -> None:
        self._settings = settings
        self._link = CoreLink(settings.endpoint, settings.secret)
        self._health = HealthServicer(SERVICES)
        self._readiness = Readiness(self._health)
        self._calls = Calls(settings.call_limits)
        self._streams = StreamTable(self._link.send, settings.limits, lambda: self._calls.num_unread)
        self._queries = CoreQueries(self._link.send)
        self._server = self._make_server()
        self._stop = asyncio.Event()
        # The newest model told and not looked at yet: workers of other sizes may join while one is loaded.
        self._told: frontend_pb2.ModelState | None = None
        self._loading: asyncio.Task[None] | None = None

    async def run(self, on_listening: Callable[[str], None]) -> None:
        """Serves until `stop` is asked for and the streams have ended. Raises address.ListenError.

        `on_listening` is told the address with the port that was bound.
        """
        address = listen.bind(self._server, self._settings.listen)
        await self._server.start()
        link = asyncio.create_task(self._link.run(self))
        sweep = asyncio.create_task(self._sweep())
        stop = asyncio.create_task(self._drained())
        on_listening(address)
        try:
            await asyncio.wait([link, sweep, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in (link, sweep):
                if task.done():
                    task.result()
        finally:
            await self._server.stop(STOP_SECONDS)
            self._readiness.lose_core()
            for task in (link, sweep, stop):
                task.cancel()
            await asyncio.gather(link, sweep, stop, return_exceptions=True)

    def stop(self) -> None:
        """Takes no more requests, and ends when those that run have ended or the grace is over."""
        if not self._stop.is_set():
            logger.info("stopping: %d streams have %g s to end", self._streams.num_open, self._settings.grace_seconds)
        self._readiness.drain()
        self._stop.set()

    def stop_on_signals(self) -> None:
        """SIGTERM stops. SIGINT, which a terminal sends to parent and child alike, is left to the parent."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def on_message(self, message: frontend_pb2.CoreToFrontend) -> None:
        """Deals out what the core says."""
        match message.WhichOneof("message"):
            case "step_output":
                self._streams.step_output(message.step_output)
            case "admitted":
                self._streams.admitted(message.admitted)
            case "rejected":
                self._streams.rejected(message.rejected)
            case "abort_reply":
                reply = control_pb2.AbortResponse(results=message.abort_reply.results)
                self._queries.answer(message.abort_reply.query, reply)
            case "load_reply":
                self._queries.answer(message.load_reply.query, message.load_reply.load)
            case "flush_reply":
                flushed = control_pb2.FlushCacheResponse(pages=message.flush_reply.pages)
                self._queries.answer(message.flush_reply.query, flushed)
            case "model_state":
                self._take_model(message.model_state)
            case "core_status":
                self._readiness.set_core_status(message.core_status)
            case "draining":
                logger.info("the core is shutting down: no new requests")
                self._readiness.drain()
            case _:
                logger.error("the core sent a message that this front end does not know")

    def on_lost(self) -> None:
        """Everything that the core owed is failed; a new one serves anew."""
        if self._loading is not None:
            self._loading.cancel()
        self._told = self._loading = None
        self._readiness.lose_core()
        self._streams.fail_all(lambda: status.not_ready("the scheduler's core is gone"))
        self._queries.fail_all()

    def _take_model(self, state: frontend_pb2.ModelState) -> None:
        if not state.ready:
            return
        self._told = state
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        """One after another, so that the last one told is the one that is served."""
        while self._told is not None:
            state, self._told = self._told, None
            try:
                served = await asyncio.to_thread(model.load, state, self._readiness.served)
            except Exception:
                logger.exception("the model that the core serves cannot be loaded")
                continue
            logger.info("serving %s, up to %d tokens a sequence", served.info.model, served.info.max_length)
            self._readiness.set_model(served)

    async def _drained(self) -> None:
        await self._stop.wait()
        try:
            async with asyncio.timeout(self._settings.grace_seconds):
                await self._streams.wait_idle()
        except TimeoutError:
            logger.warning("the grace is over with %d streams open", self._streams.num_open)
            over = f"the service is shutting down and its grace of {self._settings.grace_seconds:g} s is over"
            self._streams.fail_all(lambda: status.not_ready(over))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._streams.drop_stalled()
            self._calls.sweep(self._health.stalled(self._settings.call_limits.answer_seconds))

    def _make_server(self) -> grpc.aio.Server:
        settings = self._settings
        options = server_options(
            max_message_bytes=settings.max_message_bytes,
            share_port=settings.share_port,
            max_connections=allow_connections(),
        )
        server = grpc.aio.server(options=options)
        inference = InferenceServicer(self._readiness, self._streams, max_message_bytes=settings.max_message_bytes)
        control = ControlServicer(self._readiness, self._queries)
        methods.add_to_server(server, self._calls, inference, control, self._health)
        if settings.reflection:
            methods.add_reflection(server)
        return server
