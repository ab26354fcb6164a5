"""An operator's calls of the asynchronous client."""

import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tandem.v1 import control_pb2

from tandem_client import types
from tandem_client.credentials import Metadata
from tandem_client.operations.requests import Running, update_request
from tandem_client.wire import messages
from tandem_client.wire.rpc_errors import ErrorReader


class AsyncOperations:
    """A part of `AsyncClient`, which owns the channel."""

    address: str
    _metadata: Metadata
    _stubs: Any
    _call: Any

    async def drain(
        self, worker: str = "", *, max_seconds: float = 0.0, force: bool = False, timeout: float | None = None
    ) -> AsyncIterator[types.DrainProgress]:
        """Empties a worker, or the service without a name, and ends it; see `Client.drain`."""
        request = control_pb2.DrainRequest(worker=worker, max_seconds=max_seconds, force=force)
        async for message in self._progress(self._stubs.control.Drain, request, timeout):
            yield messages.drain_progress(message)

    async def update_weights(
        self,
        folder: str | os.PathLike[str],
        *,
        version: str,
        running: Running = "recompute",
        in_turn: bool = False,
        max_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> AsyncIterator[types.UpdateProgress]:
        """Lets all workers load new weights of the same model; see `Client.update_weights`."""
        request = update_request(folder, version=version, running=running, in_turn=in_turn, max_seconds=max_seconds)
        async for message in self._progress(self._stubs.control.UpdateWeights, request, timeout):
            yield messages.update_progress(message)

    async def flush_cache(self, *, timeout: float | None = None) -> int:
        """Empties the prefix cache; the number of pages that it held."""
        request = control_pb2.FlushCacheRequest()
        return (await self._call(self._stubs.control.FlushCache, request, timeout)).pages

    async def quarantine(self, *, timeout: float | None = None) -> list[types.QuarantinedRequest]:
        """The requests that the service refuses because they killed their workers, oldest first."""
        request = control_pb2.ListQuarantineRequest()
        return messages.quarantine(await self._call(self._stubs.control.ListQuarantine, request, timeout))

    async def clear_quarantine(self, *keys: str, timeout: float | None = None) -> int:
        """Ends the quarantine of the requests with these keys, of all without keys; the number of requests."""
        request = control_pb2.ClearQuarantineRequest(keys=keys)
        return (await self._call(self._stubs.control.ClearQuarantine, request, timeout)).removed

    async def _progress(self, method: Any, request: Any, timeout: float | None) -> AsyncIterator[Any]:
        try:
            async for message in method(request, timeout=timeout, metadata=self._metadata):
                yield message
        except grpc.RpcError as error:
            raise ErrorReader(address=self.address, timeout=timeout).read(error) from None
