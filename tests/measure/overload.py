"""Sends ten times the service's capacity: `python -m tests.measure.overload [--json] [--seconds S]`.

A content-checking worker with 16 rows and steps of 10 ms completes at most 48 requests of 32 tokens per second. Part
one sends 45 per second, part two 500; both parts run with one front end and then with two. Callers are processes of
their own (`overload_client`): one sends the requests, the other polls health and load. The bars are for a quiet machine
with a core for each process. Owns the order, the figures and the report.
"""

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.measure.machine import cpu_seconds, description, waited_seconds
from tests.measure.overload_client import MAX_NEW_TOKENS
from tests.measure.percentiles import percentiles
from tests.rigs.processes import Child, Rig, SchedulerProcess

NUM_ROWS, STEP_MS = 16, 10
ALONE_RATE, OVERLOAD_RATE = 45.0, 500.0
MAX_WAITING = 64
BAR_REFUSAL_MS, BAR_HEALTH_MS, BAR_GOODPUT = 20.0, 50.0, 0.95
# Seconds left out at the beginning and the end of a part, while rows and queue fill or empty.
EDGE_SECONDS = 1.0
TIMEOUT_SECONDS = 120.0


def _client(rig: Rig, role: str, address: str, seconds: float, rate: float = 1.0) -> Child:
    flags = ["--address", address, "--seconds", str(seconds), "--rate", str(rate)]
    child = Child(role, ["tests.measure.overload_client", role, *flags])
    rig.children.append(child)
    return child


def _pids(scheduler: SchedulerProcess, worker: Child) -> dict[str, list[int]]:
    children = psutil.Process(scheduler.pid).children()
    front_ends = [child.pid for child in children if "scheduler_svc.frontend" in child.cmdline()]
    return {"core": [scheduler.pid], "front ends": front_ends, "worker": [worker.pid]}


def _idle_rows(steps: Path, begun: float, ended: float) -> float:
    """Returns the mean number of free rows while requests were refused, between these seconds of the steps file."""
    with steps.open() as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    running = [int(row["running"]) for row in rows if begun <= float(row["at_seconds"]) <= ended and row["ms"] != ""]
    return NUM_ROWS - sum(running) / len(running) if running else float("nan")


def run_part(rig: Rig, scheduler: SchedulerProcess, worker: Child, steps: Path, rate: float, seconds: float) -> Any:
    """Runs one part. Returns its figures."""
    pids = _pids(scheduler, worker)
    probe = _client(rig, "probe", scheduler.address, seconds)
    caller = _client(rig, "load", scheduler.address, seconds, rate)
    # The steps file's clock starts with the service.
    origin = psutil.Process(scheduler.pid).create_time()
    before, begun = {name: sum(map(cpu_seconds, ids)) for name, ids in pids.items()}, time.time()
    waited = sum(map(waited_seconds, pids["front ends"]))
    answers = json.loads(caller.wait_line(r'^\{"ended_at".*\}$', seconds + TIMEOUT_SECONDS).group())
    wall = time.time() - begun
    used = {name: sum(map(cpu_seconds, ids)) - before[name] for name, ids in pids.items()}
    waited = sum(map(waited_seconds, pids["front ends"])) - waited
    probed = json.loads(probe.wait_line(r'^\{"health_seconds".*\}$', TIMEOUT_SECONDS).group())
    in_time = [at for at in answers["ended_at"] if EDGE_SECONDS <= at <= seconds]
    goodput = len(in_time) / (seconds - EDGE_SECONDS)
    window = (begun - origin + 2 * EDGE_SECONDS, begun - origin + seconds - EDGE_SECONDS)
    return {
        "rate": rate,
        "front_ends": len(pids["front ends"]),
        "requests": len(answers["lateness"]),
        "completed_per_second": goodput,
        "tokens_per_second": goodput * MAX_NEW_TOKENS,
        "refused": len(answers["refusals"]),
        "refusal_ms": percentiles([1e3 * one for one in answers["refusals"]], (50, 99)),
        "health_ms": percentiles([1e3 * one for one in probed["health_seconds"]], (50, 99)),
        "first_token_ms": percentiles([1e3 * one for one in answers["first_tokens"]], (50, 99)),
        "idle_rows": _idle_rows(steps, *window),
        "client_late_ms": percentiles([1e3 * one for one in answers["lateness"]], (50, 99)),
        "cpu_share": {
            **{name: seconds_used / wall for name, seconds_used in used.items()},
            "client": answers["cpu_seconds"] / seconds,
        },
        # Seconds for which the process was ready and its core ran others.
        "front_ends_kept_waiting_share": waited / wall,
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


def bars(alone: Any, overload: Any) -> list[dict[str, Any]]:
    """Returns each bar with its value and result."""
    share = overload["completed_per_second"] / alone["completed_per_second"]
    refusal, health = overload["refusal_ms"].get("p99", float("nan")), overload["health_ms"]["p99"]
    return [
        {"bar": f"refusal p99 at most {BAR_REFUSAL_MS:g} ms", "value": refusal, "met": refusal <= BAR_REFUSAL_MS},
        {"bar": f"health p99 at most {BAR_HEALTH_MS:g} ms", "value": health, "met": health <= BAR_HEALTH_MS},
        {"bar": f"goodput at least {BAR_GOODPUT:.0%} of part one's", "value": share, "met": share >= BAR_GOODPUT},
        {"bar": "no unexpected answers", "value": sum(overload["others"].values()), "met": not overload["others"]},
    ]


def _pair(figures: dict[str, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in figures.values()) or "none"


def print_part(part: Any) -> None:
    """Prints one part's figures."""
    word = "front end" if part["front_ends"] == 1 else "front ends"
    print(f"\n{part['rate']:g} requests/s, {part['front_ends']} {word}: {part['requests']} requests")
    completed, tokens = part["completed_per_second"], part["tokens_per_second"]
    print(f"  goodput:              {completed:.1f} requests/s, {tokens:.0f} tokens/s")
    print(f"  refused:              {part['refused']}, p50 / p99 in ms: {_pair(part['refusal_ms'])}")
    print(f"  health, ms:           {_pair(part['health_ms'])}")
    print(f"  first token, ms:      {_pair(part['first_token_ms'])}")
    print(f"  rows idle:            {part['idle_rows']:.2f} of {NUM_ROWS}")
    print(f"  client late, ms:      {_pair(part['client_late_ms'])}")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in part["cpu_share"].items())
    print(f"  CPU of one core:      {shares}")
    print(f"  ready, not running:   front ends {part['front_ends_kept_waiting_share']:.1%} of the time")
    for what, count in part["others"].items():
        print(f"  other answers:        {count} x {what}")


def main() -> int:
    """Returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.overload", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the overload; part one takes half")
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    about, is_met = description(), True
    print(json.dumps(about) if args.json else ", ".join(f"{name} {value}" for name, value in about.items()))
    for count in args.front_ends:
        parts = run(count, args.seconds, args.seconds / 2)
        found = bars(*parts)
        is_met = is_met and all(line["met"] for line in found)
        for part in parts:
            print(json.dumps(part)) if args.json else print_part(part)
        for line in found:
            value = f"{line['value']:.2f}".removesuffix(".00")
            print(json.dumps(line) if args.json else f"{line['bar']}: {value}, {'met' if line['met'] else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
