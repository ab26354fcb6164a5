"""Channels to the service that survive the death of its front ends. Knows nothing of the expected answers."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tests.rigs.streams import Stream
from tests.rigs.transcript import SampleTranscript, Transcript

# A dead front end is replaced in half a second; gRPC's own first pause is a second.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_ANSWER_SECONDS = 5.0


class Connection:
    """One channel; the kernel gives it to one of the front ends whenever it connects."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        # gRPC cancels a call when its future is dropped.
        self._aborts: deque[Any] = deque(maxlen=256)

    def generate(self, request: inference_pb2.GenerateRequest, timeout: float | None = None) -> Stream:
        return Stream(self._inference.Generate(request, timeout=timeout))

    def resume(self, request_id: str, secret: bytes, transcript: Transcript, num_samples: int) -> Stream:
        """Continues a stream that ended after it was accepted."""
        samples = [transcript.samples.get(idx, SampleTranscript()) for idx in range(num_samples)]
        offsets = [
            inference_pb2.SampleOffset(token_ids=len(sample.tokens), text_chars=len(sample.text)) for sample in samples
        ]
        request = inference_pb2.ResumeRequest(request_id=request_id, resume_secret=secret, offsets=offsets)
        transcript.expect_resumed()
        return Stream(self._inference.Resume(request), transcript=transcript)

    def abort(self, request_id: str) -> None:
        """Aborts a request, and does not wait for the answer."""
        request = control_pb2.AbortRequest(request_ids=[request_id])
        self._aborts.append(self._control.Abort.future(request, timeout=_ANSWER_SECONDS))

    def load(self) -> control_pb2.GetLoadResponse | None:
        """The load, or None if no front end answers."""
        try:
            return self._control.GetLoad(control_pb2.GetLoadRequest(), timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return None

    def is_served(self) -> bool:
        """Whether its front end says that a request which arrives now is computed."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def close(self) -> None:
        self._channel.close()


def first_load(connections: Sequence[Connection]) -> Any:
    """The load from the first connection that answers, or None."""
    return next((load for one in connections if (load := one.load()) is not None), None)
