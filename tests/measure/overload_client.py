"""The clients of the overload benchmark; they return raw times.

`load` starts requests at given times, whether or not earlier ones have been answered; `probe` polls the service's
health and load. Each is a process of its own, so that neither waits for the other or for the service.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tests.measure.machine import cpu_seconds

MAX_NEW_TOKENS = 32
PROMPT_BYTES = 64
HEALTH_EVERY_SECONDS = 0.02
LOAD_EVERY_SECONDS = 0.1
# Number of connections; the system spreads them over front ends that share the address.
NUM_CHANNELS = 8
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


async def _generate(stub: Any, request: inference_pb2.GenerateRequest, answers: Answers, origin: float) -> None:
    begun, num_tokens, is_over = time.perf_counter(), 0, False
    try:
        async for message in stub.Generate(request):
            if message.HasField("delta"):
                if not num_tokens:
                    answers.first_tokens.append(time.perf_counter() - begun)
                num_tokens += len(message.delta.token_ids)
            is_over = is_over or message.HasField("summary")
    except grpc.aio.AioRpcError as error:
        is_hinted = any(key == "grpc-retry-pushback-ms" for key, _ in error.trailing_metadata() or ())
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and is_hinted:
            answers.refusals.append(time.perf_counter() - begun)
            return
        what = f"{error.code().name}: {error.details()}"
    else:
        if is_over and num_tokens == MAX_NEW_TOKENS:
            answers.ended_at.append(time.perf_counter() - origin)
            return
        what = f"{num_tokens} tokens, ended {is_over}"
    answers.others[what] = answers.others.get(what, 0) + 1


async def load(address: str, rate: float, seconds: float) -> Answers:
    """Sends exactly `rate` requests per second, each at a random time within its interval."""
    rng, answers, tasks = random.Random(1), Answers(), set[asyncio.Task[None]]()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CHANNELS)]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    for channel in channels:
        await channel.channel_ready()
    # The first call is not measured.
    await asyncio.gather(*(_generate(stub, _request(rng), Answers(), 0.0) for stub in stubs))
    cpu, origin = cpu_seconds(), time.perf_counter()
    for idx in range(round(rate * seconds)):
        due = (idx + rng.random()) / rate
        await asyncio.sleep(max(0.0, origin + due - time.perf_counter()))
        answers.lateness.append(time.perf_counter() - origin - due)
        task = asyncio.create_task(
            _generate(stubs[len(answers.lateness) % NUM_CHANNELS], _request(rng), answers, origin)
        )
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    answers.cpu_seconds = cpu_seconds() - cpu
    if tasks:
        await asyncio.wait(tasks, timeout=TIMEOUT_SECONDS)
    for channel in channels:
        await channel.close()
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
