"""One Generate call of the service, from its first message to its last."""

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from tandem.v1 import inference_pb2

from tandem_client.connection import Metadata
from tandem_client.gateway.errors import HttpError, from_service
from tandem_client.gateway.upstream.service import Service
from tandem_client.wire.request import AFFINITY_KEY, affinity_of, service_in


class ServiceCall:
    """The call. `end` must be called; it cancels a call that still runs, and the service frees its request."""

    __slots__ = ("_began", "_call", "_names", "_service", "accepted")

    def __init__(
        self, service: Service, request: inference_pb2.GenerateRequest, metadata: Metadata, names: Mapping[str, str]
    ) -> None:
        """Sends the request."""
        self._service, self._names = service, names
        own = (*metadata, (AFFINITY_KEY, affinity_of(request)))
        self._call: Any = service.inference.Generate(request, metadata=own)
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

    async def warning(self) -> str:
        """What the service warns of, in ASCII; empty if of nothing. After `begin`."""
        if not self.accepted.warnings:
            return ""
        return str(dict(await self._call.initial_metadata()).get("x-tandem-warning", ""))

    async def named_service(self) -> str | None:
        """The service that has the request, as a proxy in front of several names it. After `begin`."""
        return service_in(await self._call.initial_metadata())

    def end(self) -> None:
        """Cancels the call if it still runs."""
        self._call.cancel()
