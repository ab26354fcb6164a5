"""Measures the front: `python -m tests.measure.front [--json] [--quick] [--parts fast door memory]`.

A worker without a model answers every plan at once (`tests/rigs/instant_worker.py`), so that what remains is the
core, the front ends, the wire and the client; all of them share two cores. The parts: tests/measure/README.md. A load
runs twice: as it is, for speed and CPU; then with a clock in core and front end (`probed_service.py`), for the time
that tokens wait there. Owns the order, the bars and the report.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.measure import call
from tests.measure.front import memory
from tests.measure.front.figures import delivery_ms, stream_figures, wait_figures
from tests.measure.front.probed_service import waits
from tests.measure.harness import Bar, Measurement, in_turns, spread
from tests.measure.machine import thread_seconds
from tests.rigs.door import Door
from tests.rigs.processes import Rig

NUM_CORES = 2
WAIT_BAR_MS = 20.0
# Of the parts that run with something and without: runs of each kind, and their seconds.
TURNS, TURN_SECONDS = 5, 5.0
DOOR_BAR, OPEN_STREAMS = 1.1, 10_000
METRICS_BAR_US = 2.0
METRICS_FLAGS = ("--metrics-listen", "127.0.0.1:0")
TIMEOUT_SECONDS = 180.0
_PARTS = ("fast", "steady", "paced", "door", "metrics", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load and its bars, which hold for one front end."""

    name: str
    num_streams: int
    # The limit of each stream's output, which it does not reach.
    num_tokens: int
    seconds: float
    step_ms: float
    # CPU of front end and core per token, in microseconds.
    cpu_bar: float
    # Tokens per second to clients; 0: the load has its pace.
    speed_bar: float = 0.0


FAST = Load(name="fast", num_streams=256, num_tokens=40_000, seconds=8.0, step_ms=0.0, cpu_bar=25.0, speed_bar=60_000.0)
STEADY = Load(
    name="steady",
    num_streams=256,
    num_tokens=20_000,
    seconds=8.0,
    step_ms=2.5,
    cpu_bar=25.0,
    speed_bar=100_000.0,
)
PACED = Load(name="paced", num_streams=32, num_tokens=1000, seconds=10.0, step_ms=50.0, cpu_bar=90.0)


def run(
    load: Load, num_front_ends: int, *, is_probed: bool, door: Door | None = None, more_flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs one load on processes of its own. Returns its figures; those of the waits only if it is probed.

    With a `door`, callers use TLS and a token.
    """
    with Rig() as rig, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        notes = ["--sent-at", f"{folder}/worker.npy", f"--streams={load.num_streams}", f"--tokens={load.num_tokens}"]
        worker = memory.instant_worker(rig, load.num_streams, load.num_tokens, load.step_ms, *notes)
        program = ("tests.measure.front.probed_service", name) if is_probed else ("scheduler_svc",)
        flags = ["--frontends", str(num_front_ends), "--log-level", "warning"]
        scheduler = rig.scheduler(*flags, *(door.service_flags if door else ()), *more_flags, program=program)
        if door is None:
            rig.caller(scheduler).wait_serving()
        door_keys = {"token": door and door.token, "tls_ca": door and str(door.authority)}
        words = call.words(
            "front.client.stream", address=scheduler.address, streams=load.num_streams, tokens=load.num_tokens,
            seconds=load.seconds, file=f"{folder}/client.npy", **door_keys,
        )  # fmt: skip
        client = rig.start("client", *words)
        client.wait_line("^streaming$", TIMEOUT_SECONDS)
        front_ends = [child.pid for child in psutil.Process(scheduler.pid).children()]
        pids = {"front_end": front_ends, "core": [scheduler.pid], "client": [client.pid], "worker": [worker.pid]}
        before, begun = {who: sum(map(thread_seconds, ids)) for who, ids in pids.items()}, time.monotonic()
        client.wait_line("^over$", TIMEOUT_SECONDS)
        seconds = time.monotonic() - begun
        used = {who: sum(map(thread_seconds, ids)) - before[who] for who, ids in pids.items()}
        checked = call.answer(client, TIMEOUT_SECONDS)
        rows = np.load(folder / "client.npy")
        for child in (worker, scheduler):
            child.terminate()
        figures = stream_figures(rows, checked.pop("begun"), checked.pop("over"))
        # The window as this process sees it differs by the time that a line takes.
        num_tokens = figures["tokens_per_second"] * seconds
        return {
            "part": load.name,
            "front_ends": num_front_ends,
            **figures,
            "delivery_ms": delivery_ms(rows, np.load(folder / "worker.npy")),
            "cpu_us_per_token": {who: 1e6 * spent / num_tokens for who, spent in used.items()},
            "wrong_streams": checked["wrong"],
            **(wait_figures(waits(folder)) if is_probed else {}),
        }


def with_and_without(
    load: Load, num_runs: int, figure: Callable[[dict[str, Any]], float], **options: Any
) -> tuple[dict[str, dict[str, float]], Bar]:
    """Runs a load with these options and without, in turn. Returns the figure of both, and the bar of wrong tokens."""
    sides = {"without": {}, "with": options}
    runs = in_turns(
        num_runs, {side: partial(run, load, 1, is_probed=False, **each) for side, each in sides.items()}
    )  # fmt: skip
    num_wrong = sum(each["wrong_streams"] for of in runs.values() for each in of)
    found = {side: spread(list(map(figure, of))) for side, of in runs.items()}
    return found, Bar(name="streams with wrong tokens", value=num_wrong, limit=0)


def measure_door(load: Load, num_runs: int) -> tuple[dict[str, Any], list[Bar]]:
    """The service's CPU per token, with TLS and tokens and without."""
    with tempfile.TemporaryDirectory() as name:
        found, wrong = with_and_without(load, num_runs, service_us, door=Door(Path(name)))
    bar = f"CPU per token with TLS and tokens, of that without, {load.name}"
    ratio = found["with"]["median"] / found["without"]["median"]
    line = {"part": f"door, {load.name}", "cpu_us_per_token": found}
    return line, [Bar(name=bar, value=ratio, limit=DOOR_BAR), wrong]


def service_us(figures: dict[str, Any]) -> float:
    """CPU us per token of front end and core."""
    return figures["cpu_us_per_token"]["front_end"] + figures["cpu_us_per_token"]["core"]


def measure_metrics(load: Load, num_runs: int) -> tuple[dict[str, Any], list[Bar]]:
    """The front end's CPU per delta, with a metrics page and without."""
    found, wrong = with_and_without(
        load,
        num_runs,
        lambda figures: figures["cpu_us_per_token"]["front_end"] * figures["tokens_per_message"],
        more_flags=METRICS_FLAGS,
    )
    bar = f"CPU us per delta that metrics add to the front end, {load.name}"
    added = found["with"]["median"] - found["without"]["median"]
    line = {"part": f"metrics, {load.name}", "front_end_us_per_delta": found}
    return line, [Bar(name=bar, value=added, limit=METRICS_BAR_US), wrong]


def bars(load: Load, plain: dict[str, Any], probed: dict[str, Any]) -> list[Bar]:
    longest, num_wrong = probed["front_end_ms"]["p100"], plain["wrong_streams"] + probed["wrong_streams"]
    return [
        Bar(name="tokens per second", value=plain["tokens_per_second"], limit=load.speed_bar, is_floor=True),
        Bar(name="CPU us per token of front end and core", value=service_us(plain), limit=load.cpu_bar),
        Bar(name="longest wait of a token in the front end, ms", value=longest, limit=WAIT_BAR_MS),
        Bar(name="streams with wrong tokens", value=num_wrong, limit=0),
    ][load.speed_bar == 0 :]


def measure(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Bar]]]:
    for load in (FAST, STEADY, PACED):
        if load.name in args.parts:
            of_part = replace(load, seconds=1.0) if args.quick else load
            plain = run(of_part, args.front_ends, is_probed=False)
            yield plain, []
            probed = run(of_part, 1, is_probed=True)
            yield {**probed, "part": f"{load.name}, with a clock"}, bars(load, plain, probed)
    seconds, runs, num_open = (1.0, 1, 50) if args.quick else (TURN_SECONDS, TURNS, OPEN_STREAMS)
    if "door" in args.parts:
        for load in (STEADY, PACED):
            yield measure_door(replace(load, seconds=seconds), runs)
    if "metrics" in args.parts:
        yield measure_metrics(replace(STEADY, seconds=seconds), runs)
    if "memory" in args.parts:
        yield memory.measure(num_open)


def main(argv: Sequence[str] | None = None) -> int:
    measurement = Measurement("front")
    measurement.flag("--quick", action="store_true", help="a smoke test with meaningless figures")
    measurement.flag("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    measurement.flag("--front-ends", type=int, default=1, help="front ends of the parts fast and paced")
    args = measurement.begin(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    for line, found in measure(args):
        measurement.line(line)
        measurement.bar(*found)
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
