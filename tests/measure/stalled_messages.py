"""Measures a front end under calls that stall: `python -m tests.measure.stalled_messages [--calls N…]`.

The calls of one tenant send 4 MB less a byte each, as far as the server lets them, and then nothing. Prints the front
end's peak of resident memory during 12 s, and the time from request to admission of another tenant's calls meanwhile.
"""

import asyncio
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2

from tests.measure.harness import Measurement, percentiles
from tests.rigs.raw_http2 import RawConnection
from tests.scheduler_svc.frontend.fake_core import FakeCore, Service, model_state
from tests.scheduler_svc.frontend.test_process import front_end

GENERATE = "/tandem.v1.InferenceService/Generate"
MESSAGE_BYTES = (4 << 20) - 2
SECONDS = 12.0
GREEDY, POLITE = "greedy", "polite"


def _tenant(name: str) -> frontend_pb2.Tenant:
    token = frontend_pb2.Token(hash=sha256(name.encode()).digest(), rights=["inference"])
    return frontend_pb2.Tenant(name=name, tokens=[token])


def _attack(address: str, num_calls: int) -> RawConnection:
    connection = RawConnection(address)
    streams = [connection.call(GENERATE, None, GREEDY) for _ in range(num_calls)]
    connection.stall(streams, MESSAGE_BYTES, quiet_seconds=4.0)
    return connection


async def _admission_ms(s: Service) -> float:
    begun = time.perf_counter()
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
    call = s.inference.Generate(request, metadata=(("authorization", f"Bearer {POLITE}"),))
    await s.core.admit()
    await call.read()
    elapsed = 1000 * (time.perf_counter() - begun)
    call.cancel()
    await s.core.expect("cancel")
    return elapsed


async def measure(folder: Path, num_calls: int) -> dict[str, Any]:
    """Returns a line for one number of calls."""
    core = FakeCore(f"ipc://{folder}/core.sock")
    with front_end(folder, needs_tokens=True, log_level="error") as (process, address):
        await core.expect("hello")
        await core.send(model_state=model_state())
        await core.send(tenants=frontend_pb2.Tenants(tenants=[_tenant(GREEDY), _tenant(POLITE)]))
        s = Service(core, address, None)
        await asyncio.sleep(1.0)
        watch = health_pb2_grpc.HealthStub(s.channel).Watch(
            health_pb2.HealthCheckRequest(), metadata=(("authorization", f"Bearer {POLITE}"),)
        )
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        size = psutil.Process(process.pid).memory_info
        before, peak = size().rss, 0
        attack = asyncio.create_task(asyncio.to_thread(_attack, address, num_calls)) if num_calls else None
        ends, waits = time.monotonic() + SECONDS, list[float]()
        while time.monotonic() < ends:
            waits.append(await _admission_ms(s))
            peak = max(peak, size().rss)
            await asyncio.sleep(0.02)
        if attack is not None:
            (await attack).close()
        watch.cancel()
        await s.channel.close()
    core.close()
    megabytes = {"before_mb": before / 1e6, "peak_mb": peak / 1e6}
    return {"calls": num_calls, **megabytes, "admission_ms": percentiles(waits, (50, 99))}


def main() -> int:
    measurement = Measurement("stalled_messages")
    measurement.flag("--calls", type=int, nargs="+", default=[0, 100, 400, 1000])
    for num_calls in measurement.begin().calls:
        with tempfile.TemporaryDirectory() as name:
            measurement.line(asyncio.run(measure(Path(name), num_calls)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
