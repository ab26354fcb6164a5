"""Calls to the service over real gRPC; a thread reads each stream, so that tests can wait for events.

Owns channels and reading threads. Knows nothing of processes or of the expected answers. Every wait has a time limit
and fails when it is over.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tests.rigs.transcript import Transcript
from tests.rigs.waiting import TIMEOUT_SECONDS

Metadata = Sequence[tuple[str, str]]
# A fixed window, so that the amount that a stalled reader receives does not depend on the machine.
_OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.use_local_subchannel_pool", 1)]


class Stream:
    """A Generate call in progress."""

    def __init__(self, call: Any, *, stalled: bool = False, transcript: Transcript | None = None) -> None:
        """`transcript`: that of an earlier call which this one continues."""
        self.transcript = Transcript() if transcript is None else transcript
        self.error: grpc.RpcError | None = None
        self.failure: BaseException | None = None
        self.times: list[float] = []
        """When each message arrived, in seconds of the monotonic clock."""
        self._call = call
        self._changed = threading.Condition()
        self._reading = threading.Event()
        self._ended = False
        if not stalled:
            self._reading.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                self._reading.wait()
                message = next(self._call, None)
                if message is None:
                    break
                with self._changed:
                    self.transcript.take(message)
                    self.times.append(time.monotonic())
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = error
        except BaseException as failure:
            self.failure = failure
            self._call.cancel()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    @property
    def ended(self) -> bool:
        return self._ended

    def metadata(self) -> dict[str, str]:
        """The metadata before the first message, for which it waits."""
        return dict(self._call.initial_metadata())

    def cancel(self) -> None:
        self._call.cancel()
        self._reading.set()

    def stall(self) -> None:
        """Stops reading after the current message until `resume`."""
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def wait(self, what: Callable[[Transcript], bool], seconds: float = TIMEOUT_SECONDS) -> Transcript:
        """Waits until the transcript satisfies `what`; fails if the stream ends first or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or what(self.transcript), seconds)
            if self.failure is not None:
                raise self.failure
            if not what(self.transcript):
                state = f"ended with {self.error!r}" if self._ended else f"still runs after {seconds} s"
                raise AssertionError(f"the event never came: the stream {state}, {len(self.transcript.tokens)} tokens")
            return self.transcript

    def wait_accepted(self, seconds: float = TIMEOUT_SECONDS) -> Transcript:
        return self.wait(lambda transcript: transcript.accepted is not None, seconds)

    def wait_tokens(self, count: int, seconds: float = TIMEOUT_SECONDS) -> Transcript:
        return self.wait(lambda transcript: len(transcript.tokens) >= count, seconds)

    def _join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise AssertionError(
                f"the stream still runs after {seconds} s, with {len(self.transcript.tokens)} tokens,"
                f" accepted: {self.transcript.accepted is not None}"
            )
        if self.failure is not None:
            raise self.failure

    def wait_end(self, seconds: float = TIMEOUT_SECONDS) -> "Stream":
        """Waits for the end, and returns the stream."""
        self._join(seconds)
        return self

    def result(self, seconds: float = TIMEOUT_SECONDS) -> Transcript:
        """Waits for the end. Returns the transcript of a stream that finished."""
        self._join(seconds)
        if self.error is not None:
            raise AssertionError(f"the stream failed: {self.error.code()}: {self.error.details()}")
        assert self.transcript.summary is not None, "the stream ended without a Summary"
        return self.transcript

    def failed(self, seconds: float = TIMEOUT_SECONDS) -> grpc.RpcError:
        """Waits for the end. Returns the error of a stream that failed."""
        self._join(seconds)
        assert self.error is not None, f"the stream did not fail: {self.transcript.finished}"
        return self.error


class Caller:
    """A channel to one front end."""

    def __init__(self, address: str, options: Sequence[tuple[str, int]] = ()) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=[*_OPTIONS, *options])
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._streams: list[Stream] = []

    def close(self) -> None:
        """Cancels the running streams and waits for their threads."""
        for stream in self._streams:
            stream.cancel()
        self._channel.close()
        for stream in self._streams:
            stream._thread.join(TIMEOUT_SECONDS)

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float | None = None,
        stalled: bool = False,
        metadata: Metadata = (),
    ) -> Stream:
        stream = Stream(self._inference.Generate(request, timeout=timeout, metadata=metadata), stalled=stalled)
        self._streams.append(stream)
        return stream

    def resume(self, request: inference_pb2.ResumeRequest, *, metadata: Metadata = ()) -> Stream:
        stream = Stream(self._inference.Resume(request, metadata=metadata))
        self._streams.append(stream)
        return stream

    def tokenize(self, text: str) -> list[int]:
        reply = self._inference.Tokenize(inference_pb2.TokenizeRequest(text=text), timeout=TIMEOUT_SECONDS)
        return list(reply.token_ids)

    def detokenize(self, tokens: list[int], **settings: Any) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=tokens, **settings)
        return self._inference.Detokenize(request, timeout=TIMEOUT_SECONDS).text

    def abort(self, *request_ids: str, metadata: Metadata = ()) -> list[int]:
        """Aborts the requests. Returns the outcome per id."""
        request = control_pb2.AbortRequest(request_ids=request_ids)
        answer = self._control.Abort(request, timeout=TIMEOUT_SECONDS, metadata=metadata)
        return [result.outcome for result in answer.results]

    def flush_cache(self) -> int:
        """Empties the prefix cache. Returns the number of freed pages."""
        return self._control.FlushCache(control_pb2.FlushCacheRequest(), timeout=TIMEOUT_SECONDS).pages

    def load(self) -> control_pb2.GetLoadResponse:
        return self._control.GetLoad(control_pb2.GetLoadRequest(), timeout=TIMEOUT_SECONDS)

    def model_info(self) -> control_pb2.GetModelInfoResponse:
        return self._control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=TIMEOUT_SECONDS)

    def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return self._health.Check(request, timeout=TIMEOUT_SECONDS, wait_for_ready=True).status

    def wait_health(self, status: int, seconds: float = TIMEOUT_SECONDS) -> None:
        """Waits for a health status by Watch, without polling."""
        call = self._health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=seconds, wait_for_ready=True)
        try:
            for answer in call:
                if answer.status == status:
                    return
        except grpc.RpcError as error:
            raise AssertionError(f"health did not become {status}: {error.code()}") from error
        finally:
            call.cancel()
        raise AssertionError(f"the health watch ended before it became {status}")

    def wait_serving(self, seconds: float = TIMEOUT_SECONDS) -> None:
        self.wait_health(health_pb2.HealthCheckResponse.SERVING, seconds)

    def wait_load(
        self,
        what: Callable[[control_pb2.GetLoadResponse], bool],
        seconds: float = TIMEOUT_SECONDS,
    ) -> control_pb2.GetLoadResponse:
        """Waits until GetLoad satisfies `what`, by polling, because the service has no event for it."""
        limit = time.monotonic() + seconds
        while True:
            load = self.load()
            if what(load):
                return load
            if time.monotonic() > limit:
                raise AssertionError(f"the load did not change as expected in {seconds} s; it is\n{load}")
            time.sleep(0.005)

    def wait_idle(self, seconds: float = TIMEOUT_SECONDS) -> control_pb2.GetLoadResponse:
        """Waits until no request runs or waits and no page is used, so nothing leaked."""
        return self.wait_load(
            lambda load: load.running == load.waiting == load.pages_used == load.waiting_tokens == 0, seconds
        )


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    return error.code()


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """The google.rpc details by message name, for example BadRequest or RetryInfo."""
    status = rpc_status.from_call(error)
    found: dict[str, Any] = {}
    for detail in () if status is None else status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                message = kind()
                detail.Unpack(message)
                found[kind.DESCRIPTOR.name] = message
    return found
