"""An operator's calls of the blocking client."""

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from tandem.v1 import control_pb2

from tandem_client import types
from tandem_client.credentials import Metadata
from tandem_client.operations.requests import Running, update_request
from tandem_client.wire import messages
from tandem_client.wire.rpc_errors import ErrorReader

_Progress = TypeVar("_Progress")


class Operations:
    """A part of `Client`, which owns the channel."""

    address: str
    _metadata: Metadata
    _control: Any
    _call: Any

    def drain(
        self, worker: str = "", *, max_seconds: float = 0.0, force: bool = False, timeout: float | None = None
    ) -> Iterator[types.DrainProgress]:
        """Empties a worker, or the service without a name, and ends it; yields the progress about once a second.

        `worker`: its `name` or `pid` in `load().per_worker`. `max_seconds`: the time for the drain; 0: no limit for a
        worker, `grace_seconds` for the service. `force`: also the last worker that serves. The drain goes on if the
        iteration is left early. NotFound: there is no such worker; InvalidArgument: it is the last one.
        """
        request = control_pb2.DrainRequest(worker=worker, max_seconds=max_seconds, force=force)
        return self._progress(self._control.Drain, request, timeout, messages.drain_progress)

    def update_weights(
        self,
        folder: str | os.PathLike[str],
        *,
        version: str,
        running: Running = "recompute",
        in_turn: bool = False,
        max_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> Iterator[types.UpdateProgress]:
        """Lets all workers load new weights of the same model; yields the progress about once a second.

        The last value has a final state; only DONE means that all workers have the weights. `folder`: an absolute path
        on the workers' hosts, below the service's --weights-folders, with safetensors. `version`: a name that was never
        used before. `running`: requests on a worker that loads finish first, are computed again, continue with the old
        keys and values, or are aborted. `in_turn`: one worker after the other. `max_seconds`: the time for the update;
        0: 600. The update goes on if the iteration is left early. PermissionDenied: updates are off; AlreadyExists:
        another one goes on; InvalidArgument: a wrong folder or version.
        """
        request = update_request(folder, version=version, running=running, in_turn=in_turn, max_seconds=max_seconds)
        return self._progress(self._control.UpdateWeights, request, timeout, messages.update_progress)

    def flush_cache(self, *, timeout: float | None = None) -> int:
        """Empties the prefix cache; the number of pages that it held."""
        request = control_pb2.FlushCacheRequest()
        return self._call(self._control.FlushCache, request, timeout).pages

    def quarantine(self, *, timeout: float | None = None) -> list[types.QuarantinedRequest]:
        """The requests that the service refuses because they killed their workers, oldest first."""
        request = control_pb2.ListQuarantineRequest()
        return messages.quarantine(self._call(self._control.ListQuarantine, request, timeout))

    def clear_quarantine(self, *keys: str, timeout: float | None = None) -> int:
        """Ends the quarantine of the requests with these keys, of all without keys; the number of requests."""
        request = control_pb2.ClearQuarantineRequest(keys=keys)
        return self._call(self._control.ClearQuarantine, request, timeout).removed

    def _progress(
        self, method: Any, request: Any, timeout: float | None, value: Callable[[Any], _Progress]
    ) -> Iterator[_Progress]:
        call = method(request, timeout=timeout, metadata=self._metadata)
        try:
            yield from map(value, call)
        except grpc.RpcError as error:
            raise ErrorReader(address=self.address, timeout=timeout).read(error) from None
        finally:
            call.cancel()
