"""Owns the table of open streams: passes the core's output to them and drops readers that stall.

Knows nothing of text or gRPC. A request has at most its samples' max_new_tokens and its prompt pending; `StreamLimits`
bounds how long. `step_output` reads the tokens.

Owns the requests that this front end has detached, so that they end when their caller's token is revoked. The core
knows no tokens. If this front end dies, its detached requests go on until their linger time is over.

Closes the gate of new requests for a tenant that has no place left in the core's queue, so that its next requests are
refused without work. A front end cannot see when a place becomes free, so it believes the core for a tenth of a second,
or until a request of the tenant ends here.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.config import MAX_NUM_SAMPLES
from scheduler_svc.door.tenant import EVERYONE, Caller
from scheduler_svc.frontend.core_link import CoreMessageTooLargeError
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate, Places
from scheduler_svc.frontend.sizes import MAX_ABORT_IDS, MAX_LINGER_SECONDS
from scheduler_svc.frontend.streaming.step_output import StepOutputReader
from scheduler_svc.frontend.streaming.stream import RequestStream, SampleStream, StreamLimits
from tandem_contract.plural import numbered

BELIEVED_SECONDS = 0.1
# The oldest ones are forgotten. Each takes 0.4 KB.
MAX_REMEMBERED = 8192


class Detached:
    """`send` passes a message to the core."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        self._send = send
        # The caller, and the loop's time at which the request has ended, by tenant and id, the oldest first.
        self._known: dict[tuple[str, str], tuple[Caller, float]] = {}

    def add(self, request_id: str, caller: Caller) -> None:
        """Remembers a request that lost its reader."""
        if caller.proof is None:
            return
        self.forget(caller.tenant, request_id)
        now = asyncio.get_running_loop().time()
        self._known[caller.tenant, request_id] = caller, now + MAX_LINGER_SECONDS
        for key in list(self._known)[:2]:
            if len(self._known) > MAX_REMEMBERED or self._known[key][1] <= now:
                del self._known[key]

    def forget(self, tenant: str, request_id: str) -> None:
        """The request has a reader again; its token counts from now on."""
        self._known.pop((tenant, request_id), None)

    def end_revoked(self, is_revoked: Callable[[Caller], bool]) -> None:
        """Aborts the requests of revoked tokens."""
        by_tenant: dict[str, list[str]] = {}
        for tenant, request_id in [key for key, (caller, _) in self._known.items() if is_revoked(caller)]:
            self.forget(tenant, request_id)
            by_tenant.setdefault(tenant, []).append(request_id)
        for tenant, ids in by_tenant.items():
            logger.warning("%s ended: their caller's token was revoked", numbered(len(ids), "detached request", "were"))
            for at in range(0, len(ids), MAX_ABORT_IDS):
                abort = frontend_pb2.Abort(request_ids=ids[at : at + MAX_ABORT_IDS], tenant=tenant)
                self._send(frontend_pb2.FrontendToCore(abort=abort))


logger = logging.getLogger(__name__)


class StreamTable:
    """All open streams of this front end.

    `send` passes a message to the core and returns whether it could. `unread` are the finished calls with unread
    answers; these count as open streams. `requests` is closed for a tenant that the core has no place for.
    """

    def __init__(
        self,
        send: Callable[[frontend_pb2.FrontendToCore], bool],
        limits: StreamLimits,
        unread: Places,
        requests: Gate,
        on_their_way: set[object],
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: whether several tenants call."""
        self._send = send
        self._limits = limits
        self._requests, self._on_their_way = requests, on_their_way
        self._detached = Detached(send)
        # In order of arrival.
        self._open: dict[RequestStream, None] = {}
        # By the number of each sample, which messages to and from the core call its stream.
        self._samples: dict[int, SampleStream] = {}
        self._last_id = 0
        # Samples of the open streams. A request that is not submitted yet counts as one.
        bound = Bound(most=limits.max_streams, is_shared=is_shared, thing="sample of requests", state="are open")
        self.places = Places(bound, unread)
        self._output = StepOutputReader(self._samples, limits, self._fail_broken)
        # Passes a step's tokens and ends to their streams. Drops those of closed streams.
        self.step_output = self._output.read
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def backlog_bytes(self) -> int:
        """The size of what waits for callers that do not read."""
        return sum(stream.num_bytes for stream in self._open if stream.blocked_since)

    def open(self, caller: Caller = EVERYONE) -> RequestStream:
        """Opens a stream for the running task's request. Raises Refusal if too many are open."""
        self.places.take(caller.tenant)
        stream = RequestStream(asyncio.current_task(), caller)
        self._open[stream] = None
        self._idle.clear()
        return stream

    def submit(self, stream: RequestStream, submit: frontend_pb2.Submit) -> None:
        """Numbers the request's samples and sends the request to the core. Raises Refusal if that is not possible."""
        self.places.take(stream.caller.tenant, submit.num_samples - 1)
        submit.stream = self._last_id + 1
        self._last_id += submit.num_samples
        stream.begin(submit.stream, submit)
        self._samples.update((sample.id, sample) for sample in stream.samples)
        try:
            is_sent = self._send(frontend_pb2.FrontendToCore(submit=submit))
        except CoreMessageTooLargeError as error:
            raise status.invalid("prompt", f"prompt is too long together with its page hashes: {error}") from None
        if not is_sent:
            raise status.not_ready("the scheduler's core cannot be reached")
        stream.is_submitted = True

    def resume(self, stream: RequestStream, request_id: str, secret_hash: bytes, tenant: str) -> None:
        """Asks the core for a tenant's request that lingers. Raises Refusal if that is not possible."""
        first = self._last_id + 1
        self._last_id += MAX_NUM_SAMPLES
        stream.begin_resume(first, request_id)
        self._detached.forget(tenant, request_id)
        self._samples[first] = stream.samples[0]
        resume = frontend_pb2.Resume(stream=first, request_id=request_id, secret_hash=secret_hash, tenant=tenant)
        if not self._send(frontend_pb2.FrontendToCore(resume=resume)):
            raise status.not_ready("the scheduler's core cannot be reached")
        stream.is_submitted = True

    def stop(self, sample: SampleStream, output_tokens: int) -> None:
        """Ends a sample after `output_tokens` tokens, at a stop string. Reports it unless the core has sent an End."""
        sample.is_stopped = True
        del sample.pending[:]
        if sample.end is None:
            finish = frontend_pb2.Finish(stream=sample.id, output_tokens=output_tokens)
            self._send(frontend_pb2.FrontendToCore(finish=finish))

    def close(self, stream: RequestStream) -> None:
        """Frees the request in any phase, without waiting. Closing a closed stream does nothing."""
        if stream not in self._open:
            return
        del self._open[stream]
        self.places.add(stream.caller.tenant, -max(1, len(stream.samples)))
        self._output.forget(stream)
        if stream.rejected is None:
            self._requests.open(stream.caller.tenant)
        self._cancel(stream)
        for sample in stream.samples:
            self._samples.pop(sample.id, None)
        if not self._open:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def fail(self, stream: RequestStream, failure: status.Refusal) -> None:
        """Ends a stream with `failure` after the tokens it has received, and cancels its samples in the core."""
        stream.failure = stream.failure or failure
        self._cancel(stream)
        stream.wake()

    def give_up(self, stream: RequestStream, failure: status.Refusal) -> None:
        """Like `fail`, but the caller cannot resume the request."""
        stream.is_resumable = False
        self.fail(stream, failure)

    def fail_all(self, failure: Callable[[], status.Refusal]) -> None:
        """Ends every stream that the core has not ended, because the core is gone or the grace period is over."""
        self._output.release()
        for stream in list(self._open):
            if not stream.is_ended:
                self.fail(stream, failure())

    def end_revoked(self, is_revoked: Callable[[Caller], bool]) -> None:
        """Ends the requests of callers with a revoked token or certificate. The owner calls this once a second."""
        self._detached.end_revoked(is_revoked)
        for stream in [open_one for open_one in self._open if open_one.failure is None and is_revoked(open_one.caller)]:
            logger.warning("request %s was ended: its caller's token or certificate was revoked", stream.request_id)
            self.give_up(stream, status.revoked())
            _end_write(stream)

    def drop_stalled(self) -> None:
        """Frees the requests of readers that stall. The owner calls this about once a second."""
        now = asyncio.get_running_loop().time()
        for stream in list(self._open):
            if not stream.blocked_since or stream.failure:
                continue
            if message := self._limits.stall(now - stream.blocked_since, stream.num_bytes):
                logger.warning("request %s was dropped: %s", stream.request_id, message)
                self.fail(stream, status.Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="stalled"))
                _end_write(stream)

    # The core's messages ----------------------------------------------------------------------------------------

    def admitted(self, message: frontend_pb2.Admitted) -> None:
        if sample := self._samples.get(message.stream):
            sample.stream.requests_ahead = message.requests_ahead
            self._on_their_way.discard(sample.stream.task)
            sample.stream.wake()

    def rejected(self, message: frontend_pb2.Rejected) -> None:
        if sample := self._samples.get(message.stream):
            sample.stream.rejected = message
            self._on_their_way.discard(sample.stream.task)
            if message.tenant_is_full and message.code == frontend_pb2.REJECT_CODE_QUEUE_FULL:
                refusal = status.from_rejected(message, "")
                self._requests.close(refusal, sample.stream.caller.tenant, BELIEVED_SECONDS)
            sample.stream.wake()

    def resumed(self, message: frontend_pb2.Resumed) -> None:
        if (placeholder := self._samples.get(message.stream)) is None:
            return
        stream = placeholder.stream
        try:
            self.places.take(stream.caller.tenant, len(message.samples) - 1)
        except status.Refusal as refusal:
            self.fail(stream, refusal)
            return
        try:
            stream.take_resumed(message)
        except (DecodeError, ValueError):
            # The core keeps the description unread; it may come from another version, through a journal.
            self._fail_broken(stream, "what was kept of its stream is malformed")
            return
        # The caller may have given another form of the id.
        self._detached.forget(stream.caller.tenant, stream.request_id)
        self._samples.update((sample.id, sample) for sample in stream.samples)
        stream.wake()

    def replaced(self, message: frontend_pb2.Replaced) -> None:
        """Ends a stream after its request got another reader."""
        if (sample := self._samples.get(message.stream)) is None:
            return
        stream = sample.stream
        # The core has no request of this stream any more.
        stream.is_submitted = False
        self.fail(
            stream, status.Refusal(grpc.StatusCode.ABORTED, "another reader resumed this request", reason="replaced")
        )
        _end_write(stream)

    def waits(self, message: frontend_pb2.Waits) -> None:
        """Sends callers the reasons why their requests make no progress."""
        now = time.time()
        for wait in message.waits:
            for number, seconds in zip(wait.streams, wait.seconds, strict=False):
                if (sample := self._samples.get(number)) is not None:
                    waiting = pb.Waiting(reason=wait.reason, message=wait.message, since=now - seconds)
                    sample.stream.tell(waiting)

    def _fail_broken(self, stream: RequestStream, message: str) -> None:
        logger.error("request %s: %s", stream.request_id, message)
        self.give_up(stream, status.internal(message))

    def _cancel(self, stream: RequestStream) -> None:
        if stream.is_submitted and stream.rejected is None:
            live = [sample.id for sample in stream.samples if sample.end is None]
            if live and stream.is_resumable:
                detach = frontend_pb2.Cancel(stream=stream.samples[0].id, detach=True)
                self._send(frontend_pb2.FrontendToCore(cancel=detach))
                self._detached.add(stream.request_id, stream.caller)
                live = []
            for sample_id in live:
                self._send(frontend_pb2.FrontendToCore(cancel=frontend_pb2.Cancel(stream=sample_id)))
        stream.is_submitted = False


def _end_write(stream: RequestStream) -> None:
    """Ends the handler if it is in a write, which may never end: its connection may be dead."""
    if stream.blocked_since and stream.task is not None:
        stream.task.cancel()
