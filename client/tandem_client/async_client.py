"""The client for code that runs on an event loop, and a completion that is read while the service generates it.

A client owns a channel and the names of the calls. A stream owns one call from start to end: its messages, its retries,
its cancellation; it belongs to the loop that made it. `request` builds the requests, `messages` reads the answers.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tandem_client import calls, types
from tandem_client.calls import Rpc, asynchronous, asynchronous_progress
from tandem_client.client_base import POLL_SECONDS, ClientBase, ReadyWait, lingering_request, resumed_request
from tandem_client.connection import ABORT_SECONDS, DEFAULT_ADDRESS, Access, Metadata, TlsSettings
from tandem_client.stream_base import Cancellable, Recovery, StreamBase
from tandem_client.types import Delta
from tandem_client.wire.request import (
    FIELD_KEYWORDS,
    RESUME_KEYWORDS,
    GenerateOptions,
    Prompt,
    abort_request,
    to_service,
)
from tandem_client.wire.rpc_errors import ErrorReader

_Value = TypeVar("_Value")


class AsyncCall(Cancellable, Protocol):
    """The part of a gRPC call that a stream uses."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...

    async def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


class AsyncGenerateStream(StreamBase[AsyncCall, asyncio.Event]):
    """An asynchronous iterator of deltas; `accepted`, `samples` and `summary` are set as they come.

    Deltas of several samples come mixed, each with its `sample_idx`; `samples` holds what was read, sample by sample.

    The request is sent when this object is made. It is cancelled when the loop over it ends early, when it is closed,
    when its `async with` block ends, when the task that reads it is cancelled, and when the object is
    garbage-collected; after its natural end none of these matters.
    """

    _new_event = asyncio.Event

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

    async def aclose(self) -> None:
        """Closes the stream; `contextlib.aclosing` calls this name."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        super()._begin()
        self._messages = aiter(self._call)

    async def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            try:
                message = await anext(self._messages)
                if self.accepted is None:
                    self._note_service(await self._call.initial_metadata())
                if self._is_new(message):
                    return message
            except StopAsyncIteration:
                self._end()
            except asyncio.CancelledError:
                # Either the reading task is cancelled, or another one closed the stream meanwhile.
                if self._closed.is_set():
                    break
                self.close()
                raise
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                if self.summary is not None:
                    self._end()
                    break
                await self._pause(self._pause_seconds(rpc_error))
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            self._begin()


class _Reading:
    """One loop over a stream. The end of the loop drops this object, which ends the call at once.

    An async generator would be closed later, by the event loop.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncGenerateStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._stream)

    def __del__(self) -> None:
        self._stream.close()


class AsyncStubs:
    """A channel and the calls on it."""

    def __init__(self, access: Access) -> None:
        self.channel = access.aio_channel()
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)
        # This stub has no types.
        self.health = cast(Any, health_pb2_grpc.HealthStub(self.channel))


class AsyncClient(ClientBase):
    """Talks to a service, on the event loop that first uses it; may be made before.

    A call is retried, at most `max_retries` times, if the service has not accepted it and gives a retry time.
    Every call takes `timeout`, in seconds, for all its tries together; None: no end.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = 3,
        token: str | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        """Raises ValueError if the token would be sent in plaintext to another machine; OSError for files of `tls`."""
        super().__init__(address, max_retries=max_retries, token=token, tls=tls)
        # Made at first use, because a channel belongs to the loop that runs when it is made.
        self._opened: AsyncStubs | None = None
        # Aborts of requests that linger and whose streams were closed.
        self._aborting: set[asyncio.Task[None]] = set()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        resume: bool = False,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream:
        """Starts a completion of a text or of token ids, or with `chat` an answer; iterate over the stream.

        Options as in `GenerateOptions`.
        With `resume`, the stream goes on by itself after its connection or its front end was lost. The service logs the
        ids of `traceparent`, a W3C trace context.
        """
        request, recovery = lingering_request(prompt, resume=resume, **options)
        return self._stream(request, FIELD_KEYWORDS, timeout, recovery, self._metadata_of(request, traceparent))

    def resume(
        self,
        request_id: str,
        secret: bytes,
        *,
        offsets: Iterable[types.SampleOffset] = (),
        linger_seconds: float = 0.0,
        service: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerateStream:
        """Continues the stream of a request that lingers, which this or another program began; iterate over it.

        `request_id` and `secret` are those of its Accepted (`request_id`, `resume_secret`). `offsets` tells what was
        received of each sample (`stream.offsets`); the stream has only what lies beyond. A sample without an offset
        is sent from its start. `service` is the first stream's, by which a proxy in front of several finds it.
        This reader replaces an earlier one, which gets Replaced. NotFound: no such request is kept, or the secret is
        wrong. If the stream is lost, it is continued for `linger_seconds`; 0: it raises.
        Leaving it early aborts the request, as with `generate`.
        """
        request, resumption, recovery = resumed_request(request_id, secret, offsets, linger_seconds)
        return self._stream(request, RESUME_KEYWORDS, timeout, recovery, self._metadata, resumption, service)

    def _stream(
        self,
        request: inference_pb2.GenerateRequest,
        keywords: Mapping[str, str],
        timeout: float | None,
        recovery: Recovery | None,
        metadata: Metadata,
        resumption: inference_pb2.ResumeRequest | None = None,
        service: str | None = None,
    ) -> AsyncGenerateStream:
        def start(request: inference_pb2.GenerateRequest, remaining: float | None) -> AsyncCall:
            return self._stubs.inference.Generate(request, timeout=remaining, metadata=metadata)

        def start_again(request: inference_pb2.ResumeRequest, remaining: float | None, at: str | None) -> AsyncCall:
            own = (*metadata, *to_service(at))
            return self._stubs.inference.Resume(request, timeout=remaining, metadata=own)

        return AsyncGenerateStream(
            request,
            start=start,
            tries=self._tries(timeout),
            errors=ErrorReader(address=self.address, timeout=timeout, keywords=keywords),
            resume=start_again,
            abort=self._abort_later,
            recovery=recovery,
            resumption=resumption,
            service=service,
        )

    tokenize = asynchronous(calls.tokenize)
    detokenize = asynchronous(calls.detokenize)
    render_chat = asynchronous(calls.render_chat)
    abort = asynchronous(calls.abort)
    model_info = asynchronous(calls.model_info)
    load = asynchronous(calls.load)
    health = asynchronous(calls.health)
    flush_cache = asynchronous(calls.flush_cache)
    quarantine = asynchronous(calls.quarantine)
    clear_quarantine = asynchronous(calls.clear_quarantine)
    drain = asynchronous_progress(calls.drain)
    update_weights = asynchronous_progress(calls.update_weights)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the service is ready; it may be started after this call. Raises DeadlineExceeded."""
        waiting = ReadyWait(self.address, timeout)
        while True:
            try:
                request = health_pb2.HealthCheckRequest()
                async for response in self._stubs.health.Watch(
                    request, timeout=waiting.remaining(), metadata=self._metadata
                ):
                    if waiting.is_ready(response):
                        return
            except grpc.RpcError as error:
                waiting.note(error)
            waiting.check_time()
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Cancels every call and closes the connection."""
        if self._opened is not None:
            if self._aborting:
                await asyncio.wait(self._aborting, timeout=ABORT_SECONDS)
            await self._opened.channel.close()
            self._opened = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _abort_later(self, request_id: str, service: str | None) -> None:
        """Sends an Abort without waiting, if a loop runs: a stream may be dropped after its loop has ended."""

        async def send() -> None:
            with contextlib.suppress(grpc.RpcError):
                request = abort_request([request_id])
                own = (*self._metadata, *to_service(service))
                await self._stubs.control.Abort(request, timeout=ABORT_SECONDS, metadata=own)

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        task = loop.create_task(send())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    @property
    def _stubs(self) -> AsyncStubs:
        if self._opened is None:
            self._opened = AsyncStubs(self._access)
        return self._opened

    async def _call(self, call: Rpc[_Value]) -> _Value:
        method, tries = call.method(self._stubs), self._tries(call.timeout)
        errors = ErrorReader(address=self.address, timeout=call.timeout)
        while True:
            try:
                own = (*self._metadata, *call.more)
                return call.read(await method(call.request, timeout=tries.remaining(), metadata=own))
            except grpc.RpcError as rpc_error:
                error = errors.read(rpc_error)
                pause_seconds = tries.pause_seconds(error)
                if pause_seconds is None:
                    raise error from None
            await asyncio.sleep(pause_seconds)

    async def _progress(self, call: Rpc[_Value]) -> AsyncIterator[_Value]:
        try:
            async for answer in call.method(self._stubs)(call.request, timeout=call.timeout, metadata=self._metadata):
                yield call.read(answer)
        except grpc.RpcError as error:
            raise ErrorReader(address=self.address, timeout=call.timeout).read(error) from None
