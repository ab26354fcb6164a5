"""The client and the stream, written once for the blocking and the asynchronous ones, which differ in how they wait.

Owns the settings of a client, its calls and the wait for the service; and a stream with its retries, its results, and
the rule by which it is continued after it was lost: which errors, for how long, with which pauses.
"""

import asyncio
import contextlib
import os
import random
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Generic, TypeVar, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client.address import DEFAULT_ADDRESS
from tandem_client.calls import Rpc, Stubs
from tandem_client.connection import Access, Metadata, TlsSettings, Tries
from tandem_client.errors import (
    AlreadyExists,
    ClientClosed,
    ClientForked,
    DeadlineExceeded,
    NotFound,
    NothingAnswers,
    OtherProtocol,
    QueueFull,
    TandemError,
    Unavailable,
)
from tandem_client.peer import explained
from tandem_client.types import Delta, Finished, ListedRequest, RequestPage, SampleOffset
from tandem_client.wire import messages
from tandem_client.wire.request import (
    AFFINITY_KEY,
    FIELD_KEYWORDS,
    RESUME_KEYWORDS,
    GenerateOptions,
    Prompt,
    affinity_of,
    generate_request,
    resume_request,
    service_in,
    to_service,
)
from tandem_client.wire.rpc_errors import ErrorReader
from tandem_client.wire.transcript import Transcript
from tandem_contract.plural import counted

_Event = TypeVar("_Event", threading.Event, asyncio.Event)
# The linger time of a request with `resume=True` that names none.
LINGER_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
# The statuses that gRPC's own library reports if a connection breaks during a call.
_OF_A_CONNECTION = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)

_Stream = TypeVar("_Stream")
_Value = TypeVar("_Value")
# The pause before another look at a service that stopped answering.
_POLL_SECONDS = 0.05
# W3C Trace Context, version 00.
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Recovery:
    """The losses of one stream, which may be continued for `linger_seconds` after each."""

    def __init__(self, linger_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._lost_at = 0.0
        self._num_tries = 0
        # The error that lost the stream; None while it is not lost.
        self.cause: TandemError | None = None

    def pause_seconds(self, error: TandemError) -> float | None:
        """Returns the pause before the next try; None if there will not be another."""
        if not self._is_loss(error):
            return None
        if self.cause is None:
            self.cause, self._lost_at, self._num_tries = error, self._clock(), 0
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._num_tries) * random.uniform(0.75, 1.25)
        self._num_tries += 1
        return pause if self._clock() + pause < self._lost_at + self._linger_seconds else None

    def continued(self) -> None:
        self.cause = None

    def _is_loss(self, error: TandemError) -> bool:
        """Whether the stream broke, and not the request. Before the request is accepted, fewer errors are a loss."""
        if error.request_ended:
            return False
        if self.cause is None and not error.stream_began:
            # Nothing was sent if no service answers, and one that is not ready has refused the request.
            return isinstance(error, Unavailable) and not isinstance(error, NothingAnswers) and not error.is_refusal
        if isinstance(error, Unavailable | QueueFull):
            return True
        if isinstance(error, AlreadyExists):
            # The first try of a request that is sent again has not been aborted yet.
            return not error.stream_began
        return error.code in _OF_A_CONNECTION and not error.is_refusal


class StreamBase(Transcript, Generic[_Event]):
    """A call that is sent when this object is made, and what has been read of it."""

    # The class of the event that is set when the stream is closed or has ended.
    _new_event: Callable[[], _Event]

    def __init__(
        self,
        client: "ClientBase[Any]",
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float | None,
        metadata: Metadata,
        recovery: Recovery | None,
        resumption: inference_pb2.ResumeRequest | None = None,
        service: str | None = None,
    ) -> None:
        """A lost stream is continued if `recovery` is not None. `timeout`: seconds for all tries.

        With a `resumption` this call is sent to `service` instead of the request, of which only the id is known.
        """
        read_before = () if resumption is None else resumption.offsets
        offsets = [messages.value(SampleOffset, offset) for offset in read_before]
        super().__init__(request, None if resumption is None else offsets)
        # Its private parts are those of this module.
        self._client: Any = client
        self._request = request
        self._metadata = metadata
        self._recovery = recovery
        self._tries: Tries = self._client._tries(timeout)
        keywords = FIELD_KEYWORDS if resumption is None else RESUME_KEYWORDS
        self._errors = ErrorReader(address=client.address, timeout=timeout, keywords=keywords)
        self._resumption = resumption
        self._closed = self._new_event()
        # The service that has the request, for `resume` and `abort` in another process, as a proxy in front of several
        # names it. None without one, and before the first message.
        self.service = service
        self._begin()

    def __repr__(self) -> str:
        request_id = f" {self.accepted.request_id}" if self.accepted else ""
        if self.summary is not None:
            state = "ended"
        elif self._closed.is_set():
            state = "closed"
        else:
            state = "running" if self.accepted else "not accepted yet"
        # Tokens that come without their ids are counted at a sample's end.
        counts = self._with_ids or self.summary is not None
        tokens = f", {counted(sum(sample.num_tokens for sample in self.samples), 'token')}" if counts else ""
        return f"<{type(self).__name__}{request_id} {state}{tokens}>"

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._cancel()

    @property
    def offsets(self) -> tuple[SampleOffset, ...]:
        """What has been read of each sample, as `resume` takes it."""
        return tuple(sample.offset for sample in self.samples)

    @property
    def finished(self) -> Finished | None:
        """How the completion, or the first of several, ended; None before that."""
        return self.samples[0].finished

    def _cancel(self) -> object:
        """Cancels the call. Returns the Abort under way if the request would go on without its reader, else None."""
        if self._client._is_of_parent:
            return None
        was_open = not self._closed.is_set()
        self._closed.set()
        self._call.cancel()
        lingers = self._resumption is not None or self._request.resume.linger_seconds > 0
        return self._send_abort() if was_open and lingers and not self._client._is_closed else None

    def _send_abort(self) -> object:
        return self._client._abort_later(self._request.request_id, self.service)

    def _begin(self) -> None:
        resumption = self._resumption
        if self.accepted is not None:
            resumption = resume_request(self.accepted.request_id, self.accepted.resume_secret, self.offsets)
        remaining, stubs = self._tries.remaining(), self._client._stubs
        if resumption is None:
            self._call: Any = stubs.inference.Generate(self._request, timeout=remaining, metadata=self._metadata)
        else:
            metadata = (*self._metadata, *to_service(self.service))
            self._call = stubs.inference.Resume(resumption, timeout=remaining, metadata=metadata)
        self._messages: Any = self._client._begun(self._call)

    async def _next_delta(self) -> Delta | None:
        while (message := await self._next_message()) is not None:
            if (delta := self._absorb(message)) is not None:
                return delta
        return None

    async def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            if self._client._is_of_parent:
                self._client._check_open()
            try:
                message = await self._client._next(self._messages)
                if message is None:
                    self._end()
                    break
                if self.accepted is None:
                    metadata = await self._client._answered(self._call.initial_metadata())
                    self.service = service_in(metadata) or self.service
                if self._recovery is None:
                    return message
                self._recovery.continued()
                if not self._is_repeated(message):
                    return message
            except asyncio.CancelledError:
                # Either the task that reads is cancelled, or another one closed the stream or the client meanwhile.
                if self._closed.is_set():
                    break
                self._cancel()
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    self._client._check_open()
                raise
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                if self.summary is not None:
                    self._end()
                    break
                try:
                    pause_seconds = self._pause_seconds(rpc_error)
                except TandemError as error:
                    raise await self._client._explained(error) from None
                if not await self._client._is_set(self._closed, pause_seconds):
                    self._begin()
        return None

    def _end(self) -> None:
        """The call has ended, or its connection was lost after the Summary: then nothing was missed."""
        self._closed.set()
        self._check_end()

    def _pause_seconds(self, rpc_error: grpc.RpcError) -> float:
        """Returns the pause before the next try. Closes the stream and raises if the call may not be retried."""
        if self._client._is_closed:
            self._closed.set()
            self._client._check_open()
        why = "" if self.waiting is None else f"; it was waiting: {self.waiting.message}"
        is_late = self._tries.remaining() == 0
        error = self._errors.read(rpc_error, stream_began=self.accepted is not None, is_late=is_late, why_late=why)
        pause_seconds = None if error.stream_began else self._tries.pause_seconds(error)
        if pause_seconds is None and self._recovery is not None:
            pause_seconds = self._recovery.pause_seconds(error)
            cause = self._recovery.cause
            if pause_seconds is None and cause is not None and isinstance(error, NotFound):
                # The service does not have the request any more. What the caller must know is how it was lost.
                error = cause
            elif pause_seconds is not None and not error.stream_began and self._resumption is None:
                # Whether the service has accepted the request is not known, so it must not run a second time.
                self._send_abort()
        remaining = self._tries.remaining()
        if pause_seconds is None or remaining == 0:
            self._closed.set()
            raise error from None
        return pause_seconds if remaining is None else min(pause_seconds, remaining)


class ClientBase(Generic[_Stream]):
    """The address, the number of retries and the access, which all calls of a client share."""

    # The class of the streams, and whether a channel belongs to the event loop that runs when it is made.
    _new_stream: Callable[..., _Stream]
    _is_of_loop: bool

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = 3,
        token: str | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        """Raises ValueError if the token would be sent in plaintext to another machine; OSError for files of `tls`."""
        self._access = Access(address=address, token=token, tls=tls)
        self.address = address
        self._metadata = self._access.metadata
        self._max_retries = max_retries
        # A channel of a loop is made at first use.
        self._opened: Stubs | None = None if self._is_of_loop else Stubs(self._access.channel())
        self._is_closed = False
        # The process of the channel. A child that fork made has no threads of gRPC, and the parent's connection.
        self._pid = os.getpid()
        # Aborts of lingering requests with closed streams. What is dropped is cancelled.
        self._aborting: set[Any] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        resume: bool = False,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> _Stream:
        """Starts a completion of a text or of token ids, or with `chat` an answer; iterate over the stream.

        Options as in `GenerateOptions`. `timeout`: seconds for all tries together.
        With `resume`, the stream goes on by itself after its connection or its front end was lost. The service logs the
        ids of `traceparent`, a W3C trace context. Raises ValueError if that is malformed.
        """
        request = generate_request(prompt, **options)
        if resume and options.get("linger_seconds") is None:
            request.resume.linger_seconds = LINGER_SECONDS
        if request.resume.linger_seconds and not request.request_id:
            # So that it can be aborted before the service has answered.
            request.request_id = uuid.uuid4().hex
        recovery = Recovery(request.resume.linger_seconds) if resume else None
        metadata = (*self._metadata, (AFFINITY_KEY, affinity_of(request)))
        if traceparent is not None:
            if _TRACEPARENT.fullmatch(traceparent) is None:
                raise ValueError("traceparent must have the form 00-<32 digits>-<16 digits>-<2 digits>, hexadecimal")
            metadata = (*metadata, ("traceparent", traceparent))
        return self._new_stream(self, request, timeout=timeout, metadata=metadata, recovery=recovery)

    def resume(
        self,
        request_id: str,
        secret: bytes,
        *,
        offsets: Iterable[SampleOffset] = (),
        linger_seconds: float = 0.0,
        service: str | None = None,
        timeout: float | None = None,
    ) -> _Stream:
        """Continues the stream of a request that lingers, which this or another program began; iterate over it.

        `request_id` and `secret` are those of its Accepted (`request_id`, `resume_secret`). `offsets` is what was
        received of each sample (`stream.offsets`); the stream has only what lies beyond. A sample without an offset
        is sent from its start. `service` is the first stream's, by which a proxy in front of several finds it.
        This reader replaces an earlier one, which gets Replaced. NotFound: no such request is kept, or the secret is
        wrong. If the stream is lost, it is continued for `linger_seconds`; 0: it raises.
        Leaving it early aborts the request, as with `generate`. `timeout`: seconds.
        """
        recovery = Recovery(linger_seconds) if linger_seconds > 0 else None
        resumption = resume_request(request_id, secret, offsets)
        # The known part of the request.
        request = inference_pb2.GenerateRequest(request_id=request_id)
        return self._new_stream(
            self, request, timeout=timeout, metadata=self._metadata, recovery=recovery, resumption=resumption,
            service=service,
        )  # fmt: skip

    @property
    def _stubs(self) -> Stubs:
        """The calls on the client's channel. Raises ClientClosed."""
        self._check_open()
        if self._opened is None:
            self._pid = os.getpid()
            self._opened = Stubs(cast(Any, self._access.aio_channel()))
        return self._opened

    @property
    def _is_of_parent(self) -> bool:
        return self._opened is not None and self._pid != os.getpid()

    def _check_open(self) -> None:
        """Raises ClientClosed if calls are not possible any more; every call and every read of a stream asks."""
        if self._is_of_parent:
            raise ClientForked(
                f"the client of {self.address} was made in process {self._pid}, and this is its child {os.getpid()}; "
                "make a new client after the fork"
            )
        if self._is_closed:
            raise ClientClosed(f"the client of {self.address} is closed; make a new one")

    def _abort_later(self, request_id: str, service: str | None) -> object:
        """Sends an Abort without waiting; what is returned can be waited for."""
        raise NotImplementedError

    # How a client waits: here on a loop. The blocking one has its own, which block.

    def _begun(self, call: Any) -> Any:
        """The iterator of a call's messages, for `_next`."""
        return aiter(call)

    async def _next(self, messages: Any) -> Any:
        """The next message; None after the last one."""
        return await anext(messages, None)

    async def _answered(self, call: Any) -> Any:
        """The answer of a call with one, or the metadata of a stream."""
        return await call

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _is_set(self, event: Any, seconds: float) -> bool:
        """Whether a stream's event is set within this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
        return event.is_set()

    async def _explained(self, error: TandemError) -> TandemError:
        # Its connection does not hold up the loop.
        return await asyncio.to_thread(explained, error, self._access) if isinstance(error, OtherProtocol) else error

    # What waits.

    async def _wait_ready(self, timeout: float | None) -> None:
        remaining = Tries(retries_left=0, timeout=timeout).remaining
        errors = ErrorReader(address=self.address, timeout=timeout)
        reason, is_checked = "it has not answered", False
        while True:
            try:
                request = health_pb2.HealthCheckRequest()
                answers = self._begun(self._stubs.health.Watch(request, timeout=remaining(), metadata=self._metadata))
                while (answer := await self._next(answers)) is not None:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    reason = "it answers, but does not serve yet"
            except grpc.RpcError as rpc_error:
                error = errors.read(rpc_error)
                if isinstance(error, DeadlineExceeded):
                    raise errors.not_ready(reason) from None
                if not isinstance(error, Unavailable):
                    raise error from None
                reason = error.message
                if isinstance(error, OtherProtocol) and not is_checked:
                    is_checked = True
                    # If the cause of a failed handshake is found, waiting does not change it.
                    if (cause := await self._explained(error)) is not error:
                        raise cause from None
            if remaining() == 0:
                raise errors.not_ready(reason)
            await self._sleep(_POLL_SECONDS)

    async def _call(self, call: Rpc[_Value]) -> _Value:
        method, tries = call.method(self._stubs), self._tries(call.timeout)
        errors = ErrorReader(address=self.address, timeout=call.timeout)
        metadata = (*self._metadata, *call.more)
        while True:
            try:
                answer = await self._answered(method(call.request, timeout=tries.remaining(), metadata=metadata))
                return call.read(answer)
            except grpc.RpcError as rpc_error:
                error = errors.read(rpc_error, is_late=tries.remaining() == 0)
                pause_seconds = tries.pause_seconds(error)
                if pause_seconds is None:
                    raise await self._explained(error) from None
            await self._sleep(pause_seconds)

    async def _progress(self, call: Rpc[_Value]) -> AsyncGenerator[_Value]:
        timeout = self._tries(call.timeout).remaining()
        begun = call.method(self._stubs)(call.request, timeout=timeout, metadata=self._metadata)
        answers = self._begun(begun)
        try:
            while (answer := await self._next(answers)) is not None:
                yield call.read(answer)
        except grpc.RpcError as rpc_error:
            error = ErrorReader(address=self.address, timeout=call.timeout).read(rpc_error)
            raise await self._explained(error) from None
        finally:
            begun.cancel()

    async def _pages(self, call: Rpc[RequestPage]) -> AsyncGenerator[ListedRequest]:
        while True:
            page = await self._call(call)
            for request in page.requests:
                yield request
            if not page.next_page_token:
                return
            call.request.page_token = page.next_page_token

    def _tries(self, timeout: float | None) -> Tries:
        return Tries(retries_left=self._max_retries, timeout=timeout)
