"""The time to the first token through the gateway and by gRPC, in turns, beside 256 streams of 8 tokens per second."""

import asyncio
import json
import time
from typing import Any

import grpc.aio
from tandem.v1 import inference_pb2, inference_pb2_grpc

from tests.measure.gateway.cpu import started
from tests.measure.gateway.http_stream import first_event, read_stream
from tests.measure.harness import Bar, Measurement, in_ms

NUM_STREAMS, RATE = 256, 8.0
NUM_REQUESTS = 200
PAUSE_SECONDS = 0.02
BAR_MS = 3.0


async def _direct(stub: Any) -> float:
    request = inference_pb2.GenerateRequest(text="a")
    request.stop.max_new_tokens = 4
    began = time.perf_counter()
    call = stub.Generate(request)
    while not (await call.read()).HasField("delta"):
        pass
    took = time.perf_counter() - began
    call.cancel()
    return took


async def _measure(address: str, url: str) -> tuple[list[float], list[float]]:
    seconds = 2 * NUM_REQUESTS * (PAUSE_SECONDS + 0.03) + 10
    background = json.dumps({"prompt": "a", "model": "m", "max_tokens": int(seconds * RATE), "stream": True}).encode()
    body = json.dumps({"prompt": "a", "model": "m", "max_tokens": 4, "stream": True}).encode()
    streams = list[asyncio.Task[int]]()
    for _ in range(NUM_STREAMS):
        streams.append(asyncio.create_task(read_stream(url, background)))
        # The streams begin at different times, so their tokens come at different times.
        await asyncio.sleep(1 / RATE / 40)
    direct, through = list[float](), list[float]()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        await _direct(stub)
        for _ in range(NUM_REQUESTS):
            direct.append(await _direct(stub))
            await asyncio.sleep(PAUSE_SECONDS)
            through.append(await first_event(url, body))
            await asyncio.sleep(PAUSE_SECONDS)
    assert not [stream for stream in streams if stream.done()], "a stream ended before the measurement"
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return direct, through


def measure(measurement: Measurement) -> None:
    """Prints percentiles in milliseconds and the bar."""
    with started(RATE, is_apart=True) as (address, url, _):
        direct, through = map(in_ms, asyncio.run(_measure(address, url)))
    more = through["p50"] - direct["p50"]
    measurement.line({"streams": NUM_STREAMS, "tokens_per_second": RATE, "grpc_ms": direct, "gateway_ms": through})
    measurement.bar(Bar(name="ms that the gateway adds to the median first token", value=more, limit=BAR_MS))
