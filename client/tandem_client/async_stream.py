"""One completion as it streams in, for code that runs on an event loop.

Owns one call from start to end: its messages, its retries, its cancellation. Belongs to the loop that made it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self

import grpc
from tandem.v1 import inference_pb2

from tandem_client.connection import Tries
from tandem_client.rpc_errors import ErrorReader
from tandem_client.transcript import Sample, Transcript
from tandem_client.types import Accepted, Delta, Finished, PromptInfo, Summary


class AsyncCall(Protocol):
    """The part of a gRPC call that a stream uses: its messages, and cancellation."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...

    def cancel(self) -> bool: ...


class AsyncGenerateStream:
    """An asynchronous iterator of deltas; `accepted`, `samples` and `summary` are set as they come.

    Deltas of several samples come mixed, each with its `sample_idx`; `samples` holds what was read, sample by sample.

    The request is sent when this object is made. It is cancelled when the loop over it ends early, when it is closed,
    when its `async with` block ends, when the task that reads it is cancelled, and when the object is
    garbage-collected; after its natural end none of these matters.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        start: Callable[[inference_pb2.GenerateRequest, float | None], AsyncCall],
        tries: Tries,
        errors: ErrorReader,
    ) -> None:
        self._request = request
        self._start = start
        self._tries = tries
        self._errors = errors
        self._transcript = Transcript(request)
        self._closed = asyncio.Event()
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

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Reading(self)

    async def __anext__(self) -> Delta:
        while (message := await self._next_message()) is not None:
            delta = self._transcript.absorb(message)
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def messages(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := await self._next_message()) is not None:
                self._transcript.absorb(message)
                yield message
        finally:
            self.close()

    def close(self) -> None:
        """Cancels the call; the service frees the request at once. Idempotent."""
        self._closed.set()
        self._call.cancel()

    async def aclose(self) -> None:
        """The same, by the name that `contextlib.aclosing` calls."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()

    def _begin(self) -> None:
        self._call = self._start(self._request, self._tries.remaining())
        self._messages = aiter(self._call)

    async def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            try:
                return await anext(self._messages)
            except StopAsyncIteration:
                self._closed.set()
                self._transcript.end()
            except asyncio.CancelledError:
                # Either the reading task is cancelled, or another one closed the stream meanwhile.
                if self._closed.is_set():
                    break
                self.close()
                raise
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                error = self._errors.read(rpc_error, stream_began=self.accepted is not None)
                pause_seconds = None if error.stream_began else self._tries.pause_seconds(error)
                if pause_seconds is None:
                    self._closed.set()
                    raise error from None
                await self._pause(pause_seconds)
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            self._begin()


class _Reading:
    """One loop over a stream. Leaving the loop drops this object, which ends the call at once: an async generator
    would wait for its event loop to close it."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncGenerateStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._stream)

    def __del__(self) -> None:
        self._stream.close()
