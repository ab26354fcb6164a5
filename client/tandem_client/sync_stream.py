"""One completion as it streams in, for code that may block.

Owns one call from start to end: its messages, its retries, its cancellation.
"""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc
from tandem.v1 import inference_pb2

from tandem_client.connection import Tries
from tandem_client.rpc_errors import ErrorReader
from tandem_client.transcript import Sample, Transcript
from tandem_client.types import Accepted, Delta, Finished, PromptInfo, Summary


class Call(Protocol):
    """The part of a gRPC call that a stream uses: its messages, and cancellation."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...

    def cancel(self) -> bool: ...


class GenerateStream:
    """An iterator of deltas; `accepted`, `samples` and `summary` are set as they come.

    Deltas of several samples come mixed, each with its `sample_idx`; `samples` holds what was read, sample by sample.

    The request is sent when this object is made. It is cancelled when the loop over it ends early, when it is closed,
    when its `with` block ends, and when the object is garbage-collected; after its natural end none of these matters.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        start: Callable[[inference_pb2.GenerateRequest, float | None], Call],
        tries: Tries,
        errors: ErrorReader,
    ) -> None:
        self._request = request
        self._start = start
        self._tries = tries
        self._errors = errors
        self._transcript = Transcript(request)
        self._closed = threading.Event()
        self._begin()

    def __repr__(self) -> str:
        return self._transcript.face(type(self).__name__, closed=self._closed.is_set())

    @property
    def accepted(self) -> Accepted | None:
        """The first message; None until it has come."""
        return self._transcript.accepted

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What has been read of each sample: text, token ids, logprobs, how it ended."""
        return self._transcript.samples

    @property
    def finished(self) -> Finished | None:
        """How the completion, or the first of several, ended; None before that."""
        return self._transcript.samples[0].finished

    @property
    def prompt_info(self) -> PromptInfo | None:
        """The prompt's logprobs, if requested; complete once the first delta has come."""
        return self._transcript.prompt_info

    @property
    def summary(self) -> Summary | None:
        """The last message; None until it has come."""
        return self._transcript.summary

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

    def close(self) -> None:
        """Cancels the call; the service frees the request at once. Idempotent, and safe from another thread."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()

    def _begin(self) -> None:
        self._call = self._start(self._request, self._tries.remaining())
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
                return next(self._messages)
            except StopIteration:
                self._closed.set()
                self._transcript.end()
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                error = self._errors.read(rpc_error, stream_began=self.accepted is not None)
                pause_seconds = None if error.stream_began else self._tries.pause_seconds(error)
                if pause_seconds is None:
                    self._closed.set()
                    raise error from None
                if not self._closed.wait(pause_seconds):
                    self._begin()
        return None
