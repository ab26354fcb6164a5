"""The clients of the benchmark of floods: `probe` calls Check as a monitor does, `attack` is each of the others.

Each is a process of its own.
"""

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

from tests.measure.machine import cpu_seconds
from tests.rigs.raw_http2 import RawConnection

EVERY_SECONDS = 0.02
TIMEOUT_SECONDS = 20.0
# From the start of this process to the attack.
LEAD_SECONDS = 1.0
WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/tandem.v1.InferenceService/Generate"
NUM_WATCHES, OF_A_CONNECTION, NAME_CHARS = 3_000, 1_000, 20_000
NUM_RESET_CONNECTIONS, RESETS_AT_ONCE = 4, 64
NUM_CALLS, NUM_CHANNELS = 10_000, 4


async def probe(address: str, seconds: float) -> dict[str, Any]:
    """Times each Check; failures by code."""
    waits, failed = list[float](), Counter[str]()
    end = time.perf_counter() + LEAD_SECONDS + seconds
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while time.perf_counter() < end:
            begun = time.perf_counter()
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                failed[error.code().name] += 1
            waits.append(time.perf_counter() - begun)
            await asyncio.sleep(EVERY_SECONDS)
    return {"waits": waits, "failed": failed}


def watches(address: str, seconds: float) -> dict[str, Any]:
    """Opens watches with names that never end, on connections that read no answer, and keeps them."""
    end, connections = time.perf_counter() + seconds, list[RawConnection]()
    for _ in range(NUM_WATCHES // OF_A_CONNECTION):
        connections.append(RawConnection(address))
        streams = [connections[-1].call(WATCH, None) for _ in range(OF_A_CONNECTION)]
        with contextlib.suppress(OSError):
            connections[-1].stall(streams, NAME_CHARS, quiet_seconds=0.3)
    took = seconds - (end - time.perf_counter())
    while time.perf_counter() < end:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.skip()
        time.sleep(0.05)
    return {"watches": NUM_WATCHES, "opened_per_second": NUM_WATCHES / took}


def resets(address: str, seconds: float) -> dict[str, Any]:
    """Opens calls and resets them at once. A connection that the service closes is replaced."""
    end, num_sent, num_closed = time.perf_counter() + seconds, 0, 0
    connections = [RawConnection(address) for _ in range(NUM_RESET_CONNECTIONS)]
    while time.perf_counter() < end:
        for idx, connection in enumerate(connections):
            try:
                connection.reset_calls(GENERATE, RESETS_AT_ONCE)
                connection.skip()
                num_sent += RESETS_AT_ONCE
            except OSError:
                num_closed += 1
                connection.close()
                connections[idx] = RawConnection(address)
    return {"resets": num_sent, "per_second": num_sent / seconds, "closed_connections": num_closed}


async def burst(address: str, seconds: float) -> dict[str, Any]:
    """Sends all calls at once, again when all are answered."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
    request.stop.max_new_tokens = 1
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CHANNELS)]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    codes, end, num_bursts = Counter[str](), time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        calls = [stubs[idx % NUM_CHANNELS].Generate(request, timeout=TIMEOUT_SECONDS) for idx in range(NUM_CALLS)]
        num_bursts += 1
        codes.update(await asyncio.gather(*map(_ended, calls)))
    for channel in channels:
        await channel.close()
    return {"bursts": num_bursts, "calls_per_second": codes.total() / seconds, "codes": codes}


async def _ended(call: Any) -> str:
    """Reads a stream to its end, without which its status does not come. Returns the status."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return str((await call.code()).name)


ATTACKS: dict[str, Callable[[str, float], Any]] = {"watches": watches, "resets": resets, "burst": burst}


async def attack(kind: str, address: str, seconds: float) -> dict[str, Any]:
    """Begins a second later than the probe. Returns what was done, and the share of a core that it took."""
    await asyncio.sleep(LEAD_SECONDS)
    cpu, told = cpu_seconds(), ATTACKS[kind](address, seconds)
    found = await told if inspect.iscoroutine(told) else told
    return {**found, "cpu": (cpu_seconds() - cpu) / seconds}
