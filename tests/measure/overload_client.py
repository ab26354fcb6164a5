"""The clients of the overload benchmark; they return raw times.

`load` starts requests at given times, whether or not earlier ones have been answered; `probe` polls the service's
health and load. Each is a process of its own, so that neither waits for the other or for the service. `load` writes
frames itself: with a client of grpc.aio it takes half a core, which the service then lacks on a machine with two.
"""

import asyncio
import random
import selectors
import time
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2

from tests.measure.machine import cpu_seconds
from tests.rigs.raw_http2 import DATA, HEADERS, Frame, RawConnection, fields

METHOD = "/tandem.v1.InferenceService/Generate"
MAX_NEW_TOKENS = 32
PROMPT_BYTES = 64
HEALTH_EVERY_SECONDS = 0.02
LOAD_EVERY_SECONDS = 0.1
# Number of connections; the system spreads them over front ends that share the address.
NUM_CONNECTIONS = 8
# More than all answers of a call.
WINDOW_BYTES = 1 << 20
# gRPC's codes as trailers have them, and the one that refusals have when a caller may try again.
OK, EXHAUSTED, RETRY_HINT = "0", "8", "grpc-retry-pushback-ms"
# Counted from the start of the last request.
TIMEOUT_SECONDS = 60.0


@dataclass(slots=True)
class Answers:
    """The outcome of the requests. Times in seconds; `ended_at` counts from the first request's start time."""

    ended_at: list[float] = field(default_factory=list[float])
    first_tokens: list[float] = field(default_factory=list[float])
    refusals: list[float] = field(default_factory=list[float])
    # The delay of each request's start, caused by this process alone.
    lateness: list[float] = field(default_factory=list[float])
    # Number of other outcomes than completion or a refusal with a retry hint, by description.
    others: dict[str, int] = field(default_factory=dict[str, int])
    cpu_seconds: float = 0.0


def _request(rng: random.Random) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text="".join(rng.choice("abcdefgh ") for _ in range(PROMPT_BYTES)))
    request.stop.max_new_tokens = MAX_NEW_TOKENS
    request.stop.ignore_eos = True
    return request


@dataclass(slots=True)
class _Call:
    begun: float
    num_tokens: int = 0
    is_over: bool = False
    # The bytes of a message that is not whole yet.
    received: bytes = b""


class _Caller:
    """A connection and its open calls."""

    def __init__(self, address: str) -> None:
        self.connection = RawConnection(address, window=WINDOW_BYTES)
        self.calls: dict[int, _Call] = {}

    def start(self, request: inference_pb2.GenerateRequest) -> None:
        begun = time.perf_counter()
        self.calls[self.connection.call(METHOD, request.SerializeToString())] = _Call(begun)

    def read(self, answers: Answers, origin: float) -> None:
        """Reads once, and notes what has arrived; waits until something has."""
        for frame in self.connection.arrived():
            if (call := self.calls.get(frame.stream)) is None:
                continue
            if frame.kind == DATA:
                _take_messages(call, frame.payload, answers)
            if frame.ends_stream:
                del self.calls[frame.stream]
                _take_end(call, frame, answers, origin)


def _take_messages(call: _Call, data: bytes, answers: Answers) -> None:
    call.received += data
    while len(call.received) >= (whole := 5 + int.from_bytes(call.received[1:5], "big")):
        message = inference_pb2.GenerateResponse.FromString(call.received[5:whole])
        call.received = call.received[whole:]
        if message.HasField("delta"):
            if not call.num_tokens:
                answers.first_tokens.append(time.perf_counter() - call.begun)
            call.num_tokens += len(message.delta.token_ids)
        call.is_over = call.is_over or message.HasField("summary")


def _take_end(call: _Call, frame: Frame, answers: Answers, origin: float) -> None:
    now, trailers = time.perf_counter(), fields(frame.payload) if frame.kind == HEADERS else {}
    code = trailers.get("grpc-status", "none")
    if code == EXHAUSTED and RETRY_HINT in trailers:
        answers.refusals.append(now - call.begun)
    elif code == OK and call.is_over and call.num_tokens == MAX_NEW_TOKENS:
        answers.ended_at.append(now - origin)
    else:
        what = f"status {code} {trailers.get('grpc-message', '')}: {call.num_tokens} tokens, ended {call.is_over}"
        answers.others[what] = answers.others.get(what, 0) + 1


def load(address: str, rate: float, seconds: float) -> Answers:
    """Sends exactly `rate` requests per second, each at a random time within its interval."""
    rng, answers = random.Random(1), Answers()
    callers = [_Caller(address) for _ in range(NUM_CONNECTIONS)]
    # Others round the time that they wait up to a millisecond.
    selector = selectors.SelectSelector()
    for caller in callers:
        selector.register(caller.connection, selectors.EVENT_READ, caller)

    def read_until(due: float, answers: Answers) -> None:
        while (left := due - time.perf_counter()) > 0:
            for key, _ in selector.select(left):
                key.data.read(answers, origin)

    def read_answers(answers: Answers) -> None:
        end = time.perf_counter() + TIMEOUT_SECONDS
        while time.perf_counter() < end and any(caller.calls for caller in callers):
            read_until(time.perf_counter() + LOAD_EVERY_SECONDS, answers)

    origin = time.perf_counter()
    # The first call is not measured.
    for caller in callers:
        caller.start(_request(rng))
    read_answers(Answers())
    cpu, origin = cpu_seconds(), time.perf_counter()
    for idx in range(round(rate * seconds)):
        due = (idx + rng.random()) / rate
        read_until(origin + due, answers)
        answers.lateness.append(time.perf_counter() - origin - due)
        callers[idx % NUM_CONNECTIONS].start(_request(rng))
    answers.cpu_seconds = cpu_seconds() - cpu
    read_answers(answers)
    return answers


async def probe(address: str, seconds: float) -> list[float]:
    """Polls health and load. Returns the seconds of each health check."""
    health_seconds, end = list[float](), time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        control: Any = control_pb2_grpc.ControlServiceStub(channel)

        async def ask_load() -> None:
            while time.perf_counter() < end:
                await control.GetLoad(control_pb2.GetLoadRequest())
                await asyncio.sleep(LOAD_EVERY_SECONDS)

        asking = asyncio.create_task(ask_load())
        while time.perf_counter() < end:
            begun = time.perf_counter()
            answer = await health.Check(health_pb2.HealthCheckRequest())
            health_seconds.append(time.perf_counter() - begun)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await asyncio.sleep(HEALTH_EVERY_SECONDS)
        await asking
    return health_seconds
