"""Sends ten times the service's capacity: `python -m tests.measure.overload [--json] [--seconds S]`.

A content-checking worker with 16 rows and steps of 10 ms completes at most 48 requests of 32 tokens per second. Callers
are processes of their own (`overload_client`): one sends the requests, the other polls health and load. Owns the order,
the figures and the report.
"""

import csv
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.measure import call
from tests.measure.harness import Bar, Measurement, in_ms
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Child, Rig, SchedulerProcess

NUM_ROWS, STEP_MS = 16, 10
ALONE_RATE, OVERLOAD_RATE = 45.0, 500.0
MAX_WAITING = 64
BAR_REFUSAL_MS, BAR_HEALTH_MS, BAR_GOODPUT = 20.0, 50.0, 0.95
# Seconds left out at the beginning and the end of a part, while rows and queue fill or empty.
EDGE_SECONDS = 1.0
TIMEOUT_SECONDS = 120.0


def _idle_rows(steps: Path, begun: float, ended: float) -> float:
    """Returns the mean number of free rows while requests were refused, between these seconds of the steps file."""
    with steps.open() as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    running = [int(row["running"]) for row in rows if begun <= float(row["at_seconds"]) <= ended and row["ms"] != ""]
    return NUM_ROWS - sum(running) / len(running) if running else float("nan")


def run_part(rig: Rig, scheduler: SchedulerProcess, worker: Child, steps: Path, rate: float, seconds: float) -> Any:
    front_ends = [each.pid for each in scheduler.frontends()]
    pids = {"core": [scheduler.pid], "front ends": front_ends, "worker": [worker.pid]}
    asked: dict[str, Any] = {"address": scheduler.address, "seconds": seconds}
    probe = rig.start("probe", *call.words("overload_client.probe", **asked))
    caller = rig.start("load", *call.words("overload_client.load", rate=rate, **asked))
    # The steps file's clock starts with the service.
    origin = psutil.Process(scheduler.pid).create_time()
    before, begun = {name: sum(map(cpu_seconds, ids)) for name, ids in pids.items()}, time.time()
    answers = call.answer(caller, seconds + TIMEOUT_SECONDS)
    wall = time.time() - begun
    used = {name: sum(map(cpu_seconds, ids)) - before[name] for name, ids in pids.items()}
    health_seconds = call.answer(probe, TIMEOUT_SECONDS)
    in_time = [at for at in answers["ended_at"] if EDGE_SECONDS <= at <= seconds]
    window = (begun - origin + 2 * EDGE_SECONDS, begun - origin + seconds - EDGE_SECONDS)
    return {
        "rate": rate,
        "front_ends": len(front_ends),
        "requests": len(answers["lateness"]),
        "completed_per_second": len(in_time) / (seconds - EDGE_SECONDS),
        "refused": len(answers["refusals"]),
        "refusal_ms": in_ms(answers["refusals"]),
        "health_ms": in_ms(health_seconds),
        "first_token_ms": in_ms(answers["first_tokens"]),
        "idle_rows": _idle_rows(steps, *window),
        "client_late_ms": in_ms(answers["lateness"]),
        "cpu_share": {
            **{name: seconds_used / wall for name, seconds_used in used.items()},
            "client": answers["cpu_seconds"] / seconds,
        },
        "others": answers["others"],
    }


def run(num_front_ends: int, seconds: float, quick_seconds: float) -> list[Any]:
    """Runs both parts on processes of their own."""
    with Rig() as rig, tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.csv"
        shape = ["--max-rows", str(NUM_ROWS), "--num-pages", "1024", "--page-size", "16", "--max-length", "512"]
        worker = rig.worker(*shape, "--token-budget", "512", "--step-ms", str(STEP_MS), late=False)
        flags = ["--max-waiting", str(MAX_WAITING), "--steps", str(steps), "--frontends", str(num_front_ends)]
        scheduler = rig.scheduler(*flags, "--log-level", "warning")
        rig.caller(scheduler).wait_serving()
        parts = [(ALONE_RATE, quick_seconds), (OVERLOAD_RATE, seconds)]
        return [run_part(rig, scheduler, worker, steps, rate, length) for rate, length in parts]


def bars(alone: Any, overload: Any) -> list[Bar]:
    share = overload["completed_per_second"] / alone["completed_per_second"]
    return [
        Bar(name="p99 of refusals in ms", value=overload["refusal_ms"].get("p99", float("nan")), limit=BAR_REFUSAL_MS),
        Bar(name="p99 of health in ms", value=overload["health_ms"]["p99"], limit=BAR_HEALTH_MS),
        Bar(name="goodput, of part one's", value=share, limit=BAR_GOODPUT, is_floor=True),
        Bar(name="unexpected answers", value=sum(overload["others"].values()), limit=0),
    ]


def main() -> int:
    measurement = Measurement("overload")
    measurement.flag("--seconds", type=float, default=60.0, help="duration of the overload; part one takes half")
    measurement.flag("--front-ends", type=int, nargs="+", default=[1, 2])
    args = measurement.begin()
    for count in args.front_ends:
        parts = run(count, args.seconds, args.seconds / 2)
        for part in parts:
            measurement.line(part)
        measurement.bar(*bars(*parts))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
