"""Measures the start of the service: `python -m tests.measure.start [--repeats N] [--cold] [--kill] [--json]`.

Starts `tandem serve` with the bundled model in a fresh runtime folder and sends one request as soon as it is ready, N
times. The first start is not measured: it fills the caches. Owns the order of the starts, the bar and the report.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.measure.machine import description, versions
from tests.measure.start_run import Start, measure

BAR_SECONDS = 5.0
_DEVICE = "--device cpu"


def summary(starts: list[Start]) -> dict[str, Any]:
    """Median, least and most of each time in seconds; a phase that a start lacks counts as 0."""

    def of(times: Callable[[Start], Mapping[str, float]]) -> dict[str, dict[str, float]]:
        names = dict.fromkeys(name for start in starts for name in times(start))
        return {name: _spread([times(start).get(name, 0.0) for start in starts]) for name in names}

    found: dict[str, Any] = {
        "starts": len(starts),
        "first_token": _spread([start.first_token for start in starts]),
        "milestones": of(lambda start: start.milestones),
        "worker_phases": of(lambda start: start.phases),
        "cpu_seconds": of(lambda start: start.cpu_seconds),
    }
    if pauses := [start.after_kill for start in starts if start.after_kill is not None]:
        found["after_kill"] = _spread(pauses)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values)}


def report(title: str, found: Mapping[str, Any]) -> list[str]:
    """The lines of a summary."""
    lines = [f"{title}: {found['starts']} starts; median (least to most), seconds"]
    lines += [_line("process start to first token", found["first_token"])]
    lines += [_line(name, times, 2) for name, times in found["milestones"].items()]
    if "after_kill" in found:
        lines += [_line("kill of the worker to next token", found["after_kill"])]
    lines += ["  phases of the worker"]
    lines += [_line(name, times, 2) for name, times in found["worker_phases"].items()]
    lines += ["  CPU until the first token"]
    lines += [_line(name, times, 2) for name, times in found["cpu_seconds"].items()]
    return lines


def _line(name: str, times: Mapping[str, float], depth: int = 1) -> str:
    return f"{'  ' * depth + name:<42} {times['median']:7.2f}  ({times['least']:.2f} to {times['most']:.2f})"


def main() -> None:
    """Exits with 1 if the warm median misses the bar."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.start", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=5, help="measured warm starts")
    parser.add_argument("--cold", action="store_true", help="before them, measure one start with empty caches")
    parser.add_argument("--kill", action="store_true", help="kill the worker of each start, and measure the pause")
    parser.add_argument("--worker", default="", help='more flags of the worker, such as "--model DIR"')
    args = parser.parse_args()
    flags = shlex.join([*shlex.split(_DEVICE), *shlex.split(args.worker)])
    result: dict[str, Any] = {"machine": description(), "versions": versions(), "bar_seconds": BAR_SECONDS}
    with tempfile.TemporaryDirectory(prefix="tandem-cold-") as folder:
        # The start that fills the caches is the cold one.
        first = measure(caches=Path(folder) if args.cold else None, worker_flags=flags, kill=args.cold and args.kill)
        if args.cold:
            result["cold"] = summary([first])
        else:
            print(f"not measured: a first start, {first.first_token:.2f} s", file=sys.stderr)
        caches = Path(folder) if args.cold else None
        warm = [measure(caches=caches, worker_flags=flags, kill=args.kill) for _ in range(args.repeats)]
    result["warm"] = summary(warm)
    result["warm_starts"] = [dataclasses.asdict(start) for start in warm]
    found = result["warm"]["first_token"]["median"]
    if args.json:
        print(json.dumps(result))
    else:
        for title in ("cold", "warm"):
            if title in result:
                print("\n".join(report(title, result[title])))
        print(f"bar: {BAR_SECONDS:g} s from process start to first token, warm: {found:.2f} s")
    sys.exit(found > BAR_SECONDS)


if __name__ == "__main__":
    main()
