"""Measures the start of the service: `python -m tests.measure.start [--repeats N] [--cold] [--kill] [--json]`.

Starts `tandem serve` with the bundled model in a fresh runtime folder and sends one request as soon as it is ready, N
times. The first start is not measured: it fills the caches. Owns the order of the starts, the bar and the report.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.measure.harness import Bar, Measurement, spread
from tests.measure.start_run import Start, measure

BAR_SECONDS = 5.0


def summary(starts: list[Start]) -> dict[str, Any]:
    """Median, least and most of each time in seconds; a phase that a start lacks counts as 0."""

    def of(times: Callable[[Start], Mapping[str, float]]) -> dict[str, dict[str, float]]:
        names = dict.fromkeys(name for start in starts for name in times(start))
        return {name: spread([times(start).get(name, 0.0) for start in starts]) for name in names}

    found: dict[str, Any] = {
        "starts": len(starts),
        "first_token": spread([start.first_token for start in starts]),
        "milestones": of(lambda start: start.milestones),
        "worker_phases": of(lambda start: start.phases),
        "cpu_seconds": of(lambda start: start.cpu_seconds),
    }
    if pauses := [start.after_kill for start in starts if start.after_kill is not None]:
        found["after_kill"] = spread(pauses)
    return found


def main() -> int:
    measurement = Measurement("start")
    measurement.flag("--repeats", type=int, default=5, help="measured warm starts")
    measurement.flag("--cold", action="store_true", help="before them, measure one start with empty caches")
    measurement.flag("--kill", action="store_true", help="kill the worker of each start, and measure the pause")
    args = measurement.begin()
    with tempfile.TemporaryDirectory(prefix="tandem-cold-") as folder:
        # The start that fills the caches is the cold one.
        caches = Path(folder) if args.cold else None
        first = measure(caches, kill=args.cold and args.kill)
        if args.cold:
            measurement.line({"caches": "cold, seconds", **summary([first])})
        else:
            print(f"not measured: a first start, {first.first_token:.2f} s", file=sys.stderr)
        warm = [measure(caches, kill=args.kill) for _ in range(args.repeats)]
    found = summary(warm)
    measurement.line({"caches": "warm, seconds", **found})
    first_token = found["first_token"]["median"]
    measurement.bar(Bar(name="seconds from process start to first token, warm", value=first_token, limit=BAR_SECONDS))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
