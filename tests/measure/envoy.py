"""Measures what Envoy with the committed file adds to a service:
`python -m tests.measure.envoy [--json] [--requests N]`.

The program is the one that the variable TANDEM_ENVOY names, or the one on PATH. One service, a content-checking worker
that takes no time for a step, and one caller. Requests go directly and through Envoy in turns, one at a time:
`first_token_ms` is the time from the call to the first message with a token, medians of the turns, and `added` the
median of the differences of each turn. Then 32 streams at once: microseconds of CPU that Envoy and the front end take
per token, and tokens per second.
"""

import random
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.measure.harness import Measurement, in_turns
from tests.measure.machine import cpu_seconds
from tests.rigs.envoy import HOW_TO_INSTALL, Envoy, find_envoy
from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.streams import Caller
from tests.system.asks import Ask, send

_SHAPE = ("--page-size", "16", "--max-rows", "32", "--max-length", "2048", "--num-pages", "4096")
_NUM_STREAMS, _NUM_TOKENS, _WARM_UP = 32, 500, 20


def _first_token_ms(caller: Caller, rng: random.Random) -> float:
    """The time to the first token of one request of 30 tokens, in milliseconds."""
    request = Ask(prompt=tuple(rng.choices(range(200), k=30)), max_new_tokens=2).request()
    began = time.perf_counter()
    stream = caller.generate(request)
    stream.wait_tokens(1)
    elapsed = time.perf_counter() - began
    stream.result()
    return 1e3 * elapsed


def _streaming(caller: Caller, pids: dict[str, int]) -> dict[str, float]:
    """All streams at once: tokens per second, and microseconds of CPU per token by process."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    asks = [Ask(prompt=(number, 1, 2), max_new_tokens=_NUM_TOKENS) for number in range(_NUM_STREAMS)]
    for stream in send(caller, asks):
        stream.result()
    seconds = time.perf_counter() - began
    tokens = _NUM_STREAMS * _NUM_TOKENS
    spent = {f"{name}_us": 1e6 * (cpu_seconds(pid) - before[name]) / tokens for name, pid in pids.items()}
    return {"tokens_per_second": tokens / seconds, **spent}


def measure(envoy: Envoy, scheduler: SchedulerProcess, direct: Caller, requests: int) -> dict[str, Any]:
    """The figures of both ways, and what Envoy adds."""
    through = Caller(envoy.address)
    ways, rng = {"direct": direct, "envoy": through}, random.Random(1)
    sides = {name: partial(_first_token_ms, caller, rng) for name, caller in ways.items()}
    measured = in_turns(requests, sides, warm=_WARM_UP)
    first = {name: median(each) for name, each in measured.items()}
    first["added"] = median(b - a for a, b in zip(measured["direct"], measured["envoy"], strict=True))
    pids = {"envoy": envoy.process.pid, "front_end": scheduler.frontend_pid()}
    streaming = {name: _streaming(caller, pids) for name, caller in ways.items()}
    through.close()
    return {"first_token_ms": first, "streaming": streaming}


def main() -> int:
    """Prints the figures. Without Envoy it ends with the way to install it."""
    measurement = Measurement("envoy")
    measurement.flag("--requests", type=int, default=200)
    args = measurement.begin()
    program = find_envoy()
    if program is None:
        raise SystemExit(HOW_TO_INSTALL)
    with Rig() as rig:
        rig.worker(*_SHAPE, late=False)
        scheduler = rig.scheduler()
        direct = rig.ready_caller(scheduler)
        with Envoy(program, Path(rig.runtime_dir), [scheduler.address]) as envoy:
            envoy.wait_healthy([scheduler.address])
            figures = measure(envoy, scheduler, direct, args.requests)
    measurement.line({"requests": args.requests, "streams": _NUM_STREAMS, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
