"""The memory of open streams: processes that hold them, and the same number of empty calls to compare with.

A stream is a Generate call; its caller has read the first token; the worker makes a step every 2 s. An empty call
is one of the same client to a grpc.aio server with the same options; its handler has read the request, has sent the
initial metadata and waits. Figures are resident memory (RssAnon) after all calls are open, less that before the first.
Owns both servers' start and the figures.
"""

import asyncio
from typing import Any, cast

import grpc
import grpc.aio
import psutil
from tandem.v1 import inference_pb2

from scheduler_svc.frontend.rpc.options import server_options
from tests.measure import call
from tests.measure.harness import Bar
from tests.measure.machine import memory_bytes
from tests.rigs.processes import Child, Rig

BAR_KB = 20.0
TIMEOUT_SECONDS = 180.0
STEP_SECONDS = 2.0
_WARM_STREAMS = 50
_NUM_TOKENS = 100


def instant_worker(rig: Rig, num_streams: int, num_tokens: int, step_ms: float, *flags: str) -> Child:
    """Starts a worker without a model that runs all streams at once."""
    page_size = 128
    num_pages = 2 + num_streams * (2 + num_tokens // page_size)
    sizes = {"page-size": page_size, "max-length": num_tokens + page_size, "num-pages": num_pages}
    sizes |= {"max-rows": num_streams, "token-budget": 16 * num_streams}
    words = [f"--{name}={value}" for name, value in sizes.items()]
    where = ("--runtime-dir", str(rig.runtime_dir))
    return rig.start("worker", "tests.rigs.instant_worker", *where, *words, f"--step-ms={step_ms}", *flags)


def _hold(rig: Rig, address: str, num_streams: int, until: str) -> Child:
    asked = {"address": address, "streams": num_streams, "tokens": _NUM_TOKENS, "until": until}
    client = rig.start("hold", *call.words("front.client.hold", **asked))
    client.wait_line("^holding$", TIMEOUT_SECONDS)
    return client


def _held_kb(rig: Rig, pids: dict[str, int], address: str, num_streams: int, until: str) -> dict[str, float]:
    """KB per stream of each process, without what the first streams need once."""
    _hold(rig, address, _WARM_STREAMS, until)
    before = {name: memory_bytes(pid, "RssAnon") for name, pid in pids.items()}
    _hold(rig, address, num_streams, until)
    return {name: (memory_bytes(pid, "RssAnon") - before[name]) / 1e3 / num_streams for name, pid in pids.items()}


def measure(num_streams: int) -> tuple[dict[str, Any], list[Bar]]:
    with Rig() as rig:
        empty = rig.start("empty server", *call.words("front.memory.serve_empty"))
        address = empty.wait_line(r"^listening on (\S+)$").group(1)
        of_empty = _held_kb(rig, {"server": empty.pid}, address, num_streams, "metadata")["server"]
        for child in rig.children:
            child.kill()
    with Rig() as rig:
        num_rows = num_streams + _WARM_STREAMS
        instant_worker(rig, num_rows, _NUM_TOKENS, 1e3 * STEP_SECONDS)
        flags = [f"--max-streams={num_rows}", f"--max-waiting={num_rows}", "--log-level=warning"]
        scheduler = rig.scheduler(*flags)
        rig.caller(scheduler).wait_serving()
        [front_end] = psutil.Process(scheduler.pid).children()
        pids = {"front_end": front_end.pid, "core": scheduler.pid}
        of_streams = _held_kb(rig, pids, scheduler.address, num_streams, "delta")
        for child in rig.children:
            child.kill()
    above = of_streams["front_end"] + of_streams["core"] - of_empty
    line = {"part": "memory", "streams": num_streams, "kb_per_stream": of_streams, "kb_per_empty_call": of_empty}
    return line, [Bar(name="KB per open stream above an empty gRPC call", value=above, limit=BAR_KB)]


async def serve_empty() -> None:
    """Serves calls that never end, with the front end's options."""

    async def wait(_: object, context: Any) -> None:
        await context.read()
        await context.send_initial_metadata(())
        await asyncio.get_running_loop().create_future()

    server = grpc.aio.server(options=server_options(max_message_bytes=4 << 20, share_port=False, max_connections=64))
    handlers = {"Generate": cast(Any, grpc).stream_stream_rpc_method_handler(wait)}
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()
