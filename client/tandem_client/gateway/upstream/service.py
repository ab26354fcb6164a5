"""The gateway's connection to the service: the stubs of the API and the calls that are one question and one answer.

Owns the channel. Every call carries its own caller's token; the gateway has none. The raw stubs serve the streams,
because what `AsyncClient` makes of each message costs more than the rest of the gateway.
"""

import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import chat_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tandem_client.credentials import Access, Metadata, TlsSettings
from tandem_client.errors import TandemError, Unauthenticated
from tandem_client.gateway.errors import from_service
from tandem_client.wire.rpc_errors import ErrorReader

# For the calls with one answer.
ANSWER_SECONDS = 60.0
# For the question who calls, which is answered without the core.
_CALLER_SECONDS = 5.0
# The name of the served model, for answers to requests that name none, may be as old as this.
_NAME_SECONDS = 5.0
_Answer = TypeVar("_Answer")
_NO_NAMES: Mapping[str, str] = {}
# Trailing metadata of the service's answer about its health (scheduler_svc/frontend/readiness.py).
_REASON_KEY, _SINCE_KEY = "tandem-reason", "tandem-since"


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
        """Ends all calls."""
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
        info = await self._ask(self._control.GetModelInfo, control_pb2.GetModelInfoRequest(), metadata)
        self._name, self._named_at = info.model, time.monotonic()
        return info

    async def model_name(self, metadata: Metadata) -> str:
        """Returns the name of the served model. Raises HttpError."""
        if time.monotonic() > self._named_at + _NAME_SECONDS:
            await self.model_info(metadata)
        return self._name

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata, names: Mapping[str, str]
    ) -> list[int]:
        """Returns a text's token ids. Raises HttpError."""
        return list((await self._ask(self.inference.Tokenize, request, metadata, names)).token_ids)

    async def render(self, model: str, chat: chat_pb2.Chat, metadata: Metadata, names: Mapping[str, str]) -> list[int]:
        """Returns the token ids of a conversation as the model gets it. Raises HttpError."""
        request = inference_pb2.RenderChatRequest(model=model, chat=chat)
        return list((await self._ask(self.inference.RenderChat, request, metadata, names)).token_ids)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata, names: Mapping[str, str] = _NO_NAMES
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of token ids. Raises HttpError."""
        return await self._ask(self.inference.Detokenize, request, metadata, names)

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

    async def rights(self, metadata: Metadata) -> frozenset[str]:
        """Returns the rights of the caller. Raises HttpError."""
        call = self._control.GetCaller(control_pb2.GetCallerRequest(), metadata=metadata, timeout=_CALLER_SECONDS)
        return frozenset((await self._answer(call)).rights)

    async def needs_tokens(self, seconds: float) -> bool | None:
        """Whether callers need a token; None if the service does not answer.

        It is asked by a call without one. If that has a tenant, it is the tenant of the gateway's own certificate, with
        whose rights no caller of the gateway may call.
        """
        try:
            answer = await self._control.GetCaller(control_pb2.GetCallerRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return True if isinstance(self.error(error), Unauthenticated) else None
        return bool(answer.tenant)

    async def _ask(
        self, method: Any, request: Message, metadata: Metadata, names: Mapping[str, str] = _NO_NAMES
    ) -> Any:
        return await self._answer(method(request, metadata=metadata, timeout=ANSWER_SECONDS), names)

    async def _answer(self, call: Awaitable[_Answer], names: Mapping[str, str] = _NO_NAMES) -> _Answer:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_service(self.error(error, names)) from None
