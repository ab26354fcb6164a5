"""The gateway's connection to the service: the calls that are one question and one answer, and one Generate call.

Owns the channel, and what is known of the service's door: whether it answers and asks callers for tokens. Every call
carries its own caller's token; the gateway has none, and no token file. If no call reaches the service, a handshake
shows which flag of TLS is wrong. The raw stubs serve the streams, because what `AsyncClient` makes of each message
costs more than the rest of the gateway.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tandem_client.connection import Access, Metadata, TlsSettings
from tandem_client.errors import TandemError, Unauthenticated
from tandem_client.gateway.errors import HttpError, from_service, unavailable
from tandem_client.gateway.settings import Settings
from tandem_client.peer import Names, fault
from tandem_client.wire.request import AFFINITY_KEY, affinity_of
from tandem_client.wire.rpc_errors import ErrorReader
from tandem_contract.settings import SettingError

# For the calls with one answer.
ANSWER_SECONDS = 60.0
# For GetCaller, which is answered without the core.
_CALLER_SECONDS = 5.0
# For the question whether the service drains, while this gateway does.
_DRAINS_SECONDS = 1.0
# The name of the served model, for answers to requests that name none, may be as old as this.
_NAME_SECONDS = 5.0
_Answer = TypeVar("_Answer")
_NO_NAMES: Mapping[str, str] = {}
# Trailing metadata of the service's answer about its health (scheduler_svc/frontend/readiness.py).
_REASON_KEY, _SINCE_KEY = "tandem-reason", "tandem-since"
# The reason while the service drains; the gateway says the same of itself.
SHUTTING_DOWN = "shutting_down"

_FLAGS = Names(
    tls="give --service-ca, its certificate or that of its authority",
    no_tls="leave out --service-ca and --service-tls, or start the service with --tls-cert and --tls-key",
    ca="--service-ca",
    server_name="--service-name",
    cert="--service-cert",
    key="--service-key",
)

log = logging.getLogger("tandem.gateway")

# Between two looks, and for one of them.
_LOOK_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 0.5


class Service:
    """One connection. Make it in the event loop that uses it."""

    def __init__(self, address: str, tls: TlsSettings | None, *, health_address: str | None = None) -> None:
        """`health_address`: where the health is asked without a token. Raises OSError, ValueError for files of TLS."""
        self.address = address
        self._access, self._health_address = Access(address=address, tls=tls, proxy=False), health_address
        # The newest one last. Calls may still run on an older one.
        self._channels = list[grpc.aio.Channel]()
        self.connect()
        self._name = ""
        self._named_at = -_NAME_SECONDS

    def connect(self) -> None:
        """Makes the connection of the next calls, with the files of TLS as they are now. Raises OSError, ValueError."""
        channel = self._access.aio_channel()
        self._channels.append(channel)
        # grpc's stubs lack the types of asyncio's.
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self._control: Any = control_pb2_grpc.ControlServiceStub(channel)
        if self._health_address is not None:
            channel = Access(address=self._health_address, proxy=False).aio_channel()
            self._channels.append(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def error(
        self, error: grpc.RpcError, names: Mapping[str, str] = _NO_NAMES, *, stream_began: bool = False
    ) -> TandemError:
        """The client's exception for a gRPC error, with fields named as `names` says."""
        reader = ErrorReader(address=self.address, timeout=ANSWER_SECONDS, keywords=names)
        return reader.read(error, stream_began=stream_began)

    async def model_info(self, metadata: Metadata) -> control_pb2.GetModelInfoResponse:
        """Returns the served model. Raises HttpError."""
        info = await self.ask(self._control.GetModelInfo, control_pb2.GetModelInfoRequest(), metadata)
        self._name, self._named_at = info.model, time.monotonic()
        return info

    async def model_name(self, metadata: Metadata) -> str:
        """Returns the name of the served model. Raises HttpError."""
        if time.monotonic() > self._named_at + _NAME_SECONDS:
            await self.model_info(metadata)
        return self._name

    async def ask(self, method: Any, request: Message, metadata: Metadata, names: Mapping[str, str] = _NO_NAMES) -> Any:
        """Returns the answer to a call that has one. `names`: those of fields, for errors. Raises HttpError."""
        return await self._answer(method(request, metadata=metadata, timeout=ANSWER_SECONDS), names)

    async def why_not_serving(self, metadata: Metadata, seconds: float) -> dict[str, object] | None:
        """Why a request that arrives now is not computed: a word and since when, as far as the service says.

        None if it is computed. Raises HttpError if the service does not answer.
        """
        call = self._health.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=seconds)
        answer: health_pb2.HealthCheckResponse = await self._answer(call)
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return None
        said = dict(await call.trailing_metadata())
        return {"reason": said.get(_REASON_KEY), "since": float(said[_SINCE_KEY]) if _SINCE_KEY in said else None}

    async def drains(self) -> bool:
        """Whether the service refuses requests because it stops. No if it does not answer, or not without a token."""
        try:
            why = await self.why_not_serving((), _DRAINS_SECONDS)
        except HttpError:
            return False
        return why is not None and why["reason"] == SHUTTING_DOWN

    async def rights(self, metadata: Metadata) -> frozenset[str]:
        """Returns the rights of the caller. Raises HttpError."""
        call = self._control.GetCaller(control_pb2.GetCallerRequest(), metadata=metadata, timeout=_CALLER_SECONDS)
        return frozenset((await self._answer(call)).rights)

    async def needs_tokens(self, seconds: float) -> bool | None:
        """Whether callers need a token; None if the service does not answer.

        It is asked by a call without one. If that has a tenant, it is the tenant of the gateway's own certificate; no
        caller of the gateway may use its rights.
        """
        try:
            answer = await self._control.GetCaller(control_pb2.GetCallerRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return True if isinstance(self.error(error), Unauthenticated) else None
        return bool(answer.tenant)

    async def _answer(self, call: Awaitable[_Answer], names: Mapping[str, str] = _NO_NAMES) -> _Answer:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_service(self.error(error, names)) from None


class ServiceCall:
    """One Generate call. `end` must be called; it cancels a call that still runs, and the service frees its request."""

    __slots__ = ("_began", "_call", "_names", "_service", "accepted")

    def __init__(
        self, service: Service, request: inference_pb2.GenerateRequest, metadata: Metadata, names: Mapping[str, str]
    ) -> None:
        """Sends the request."""
        self._service, self._names = service, names
        routed = (*metadata, (AFFINITY_KEY, affinity_of(request)))
        self._call: Any = service.inference.Generate(request, metadata=routed)
        self._began = False
        self.accepted = inference_pb2.Accepted()

    async def begin(self) -> None:
        """Waits until the service has accepted the request. Raises HttpError."""
        message = await self.next()
        if message is None or message.WhichOneof("event") != "accepted":
            raise HttpError(500, "the service answered without accepting the request", kind="server_error")
        self.accepted = message.accepted
        self._began = True

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """Returns the next message; None at the end. Raises HttpError."""
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise from_service(self._service.error(error, self._names, stream_began=self._began)) from None
        return None if message is grpc.aio.EOF else message

    async def metadata(self) -> Metadata:
        """What the service, and a proxy in front of several, say before the first message. After `begin`."""
        return tuple(await self._call.initial_metadata())

    def end(self) -> None:
        self._call.cancel()


class Guard:
    """What is known about the service's door."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, self._settings = service, settings
        # Why no call reaches the service; None if that has another cause than the flags.
        self._fault: str | None = None
        # None until the service has answered.
        self.needs_tokens: bool | None = None

    def check(self) -> None:
        """Raises HttpError if other machines reach this gateway and the service lets everybody in."""
        if self._settings.is_public and not self.needs_tokens:
            raise unavailable("the service asks for no tokens, so this address of the gateway is closed")

    async def start(self) -> None:
        """Asks the service for the first time. Raises SettingError if the flags of TLS do not suit it."""
        await self._look()
        if self._fault is not None:
            raise SettingError(self._fault)
        if self.needs_tokens is None:
            log.warning(
                "the service at %s does not answer yet; requests are refused until it does", self._settings.address
            )

    async def _look(self) -> None:
        needs_tokens = await self._service.needs_tokens(_LOOK_SECONDS)
        self._fault = None
        if needs_tokens is None:
            self._fault = await asyncio.to_thread(
                fault, self._settings.address, self._settings.service_tls_settings, _FLAGS
            )
        if needs_tokens is None or needs_tokens == self.needs_tokens:
            return
        self.needs_tokens = needs_tokens
        if self._settings.is_public and not needs_tokens:
            log.error("the service asks for no tokens: every machine could use it; requests are refused until it does")

    async def run(self) -> NoReturn:
        """Looks again and again: the service may be started again with other settings."""
        while True:
            await asyncio.sleep(_FIRST_LOOK_SECONDS if self.needs_tokens is None else _LOOK_SECONDS)
            before = self._fault
            await self._look()
            if self._fault is not None and self._fault != before:
                log.error("%s", self._fault)
