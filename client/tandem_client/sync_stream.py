"""A completion that is read while the service generates it, for code that may block.

Owns one call from start to end: its messages, its retries, its cancellation.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, Self, cast

import grpc
from tandem.v1 import inference_pb2

from tandem_client.connection import ABORT_SECONDS
from tandem_client.stream_base import Cancellable, StreamBase
from tandem_client.types import Delta


class Call(Cancellable, Protocol):
    """The part of a gRPC call that a stream uses."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...

    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...


class Aborting(Protocol):
    """The part of an Abort under way that its client uses."""

    def result(self, timeout: float | None = None) -> object: ...


def wait_for(aborting: Aborting) -> None:
    """Waits up to a second for an Abort. If the service cannot be reached, the request ends after its linger time."""
    with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
        aborting.result(timeout=ABORT_SECONDS)


class GenerateStream(StreamBase[Call, threading.Event]):
    """An iterator of deltas; `accepted`, `samples` and `summary` are set as they come.

    Deltas of several samples come mixed, each with its `sample_idx`; `samples` holds what was read, sample by sample.

    The request is sent when this object is made. It is cancelled when the loop over it ends early, when it is closed,
    when its `with` block ends, and when the object is garbage-collected; after its natural end none of these matters.
    """

    _new_event = threading.Event

    def __iter__(self) -> Iterator[Delta]:
        # A generator, so that leaving the loop closes it, and it this stream.
        try:
            while (delta := self._next_delta()) is not None:
                yield delta
        finally:
            self.close()

    def __next__(self) -> Delta:
        delta = self._next_delta()
        if delta is None:
            raise StopIteration
        return delta

    def messages(self) -> Iterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := self._next_message()) is not None:
                self._transcript.absorb(message)
                yield message
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the call, and waits up to a second until a request that lingers is aborted."""
        aborting = cast(Aborting | None, self._cancel())
        if aborting is not None:
            wait_for(aborting)

    def _begin(self) -> None:
        super()._begin()
        self._messages = iter(self._call)

    def _next_delta(self) -> Delta | None:
        while (message := self._next_message()) is not None:
            delta = self._transcript.absorb(message)
            if delta is not None:
                return delta
        return None

    def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            try:
                message = next(self._messages)
                if self.accepted is None:
                    self._note_service(self._call.initial_metadata())
                if self._is_new(message):
                    return message
            except StopIteration:
                self._end()
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                if self.summary is not None:
                    self._end()
                    break
                if not self._closed.wait(self._pause_seconds(rpc_error)):
                    self._begin()
        return None
