"""Random frames of the core to a worker and to a front end, in this process.

A worker's parser may raise FrameError and PlanError, which it answers, and nothing else. A front end trusts its core,
which started it; malformed frames are dropped, and any other frame must not raise.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2, worker_pb2

from gpu_worker.geometry import Geometry
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import FrameError, parse_frame, read_plan
from scheduler_svc.frontend.server import FrontEnd
from scheduler_svc.processes.frontends import FrontEndSettings
from tests.fuzz.messages import MessageMaker

_GEOMETRY = Geometry(
    page_size=16, num_pages=200, max_rows=8, max_length=256, token_budget=64, chunk_align=1, vocab_size=288
)
_STREAMS = range(1, 10)


def fuzz_worker(plans: Sequence[bytes], count: int, seed: int) -> tuple[Counter[str], set[str]]:
    """Parses `count` frames, many of them mutations of real plans. Returns the outcomes and the fields never set."""
    maker = MessageMaker(worker_pb2.CoreToWorker, random.Random(f"{seed} frames to a worker"))
    counts: Counter[str] = Counter()
    for plan in plans:
        maker.keep(plan)
    for number in range(count):
        frame = maker.frame()
        if number % 500 == 0 and plans:
            maker.keep(plans[number // 500 % len(plans)])
        try:
            message = parse_frame(frame)
            if message.HasField("plan"):
                read_plan(message.plan, _GEOMETRY)
                counts["plans read"] += 1
            else:
                counts["other messages"] += 1
        except FrameError:
            counts["frames refused"] += 1
        except PlanError:
            counts["plans refused"] += 1
        except Exception as error:
            error.add_note(f"frame {number}: {frame[:600].hex()}")
            raise
    return counts, maker.fields() - maker.covered


def fuzz_frontend(count: int, seed: int) -> tuple[Counter[str], set[str]]:
    """Passes `count` frames to a front end with open streams. Returns the outcomes and the fields never set."""
    return asyncio.run(_fuzz_frontend(count, seed))


def _sent(message: frontend_pb2.FrontendToCore) -> bool:
    return True


async def _fuzz_frontend(count: int, seed: int) -> tuple[Counter[str], set[str]]:
    maker = MessageMaker(frontend_pb2.CoreToFrontend, random.Random(f"{seed} frames to a front end"))
    counts: Counter[str] = Counter()
    front: Any = cast(Any, FrontEnd(FrontEndSettings(endpoint="ipc://unused", listen="127.0.0.1:0", share_port=False,
        reflection=False, max_message_bytes=1 << 20, grace_seconds=1.0)))  # fmt: skip
    front._streams._send = _sent
    for number in range(count):
        if number % 1000 == 0:
            for stream in list(front._streams._open):
                front._streams.close(stream)
            front._streams._last_id = 0
            for _ in _STREAMS:
                stream = front._streams.open()
                front._streams.submit(stream, frontend_pb2.Submit(num_samples=1, max_new_tokens=100))
            await asyncio.sleep(0)
        frame = maker.frame()
        try:
            message = frontend_pb2.CoreToFrontend.FromString(frame)
        except DecodeError:
            counts["frames dropped"] += 1
            continue
        try:
            front._on_message(message)
        except Exception as error:
            error.add_note(f"frame {number}: {frame[:600].hex()}")
            raise
        counts["messages handled"] += 1
    for stream in list(front._streams._open):
        front._streams.close(stream)
    front._link._context.destroy(0)
    return counts, maker.fields() - maker.covered
