"""Measures the cost of the core, optionally beside peers' schedulers: `python -m tests.measure.core [--json]`.

Owns the rounds, the figures, the bars and their output; `schedulers/` holds the measured variants. Every scheduler runs
in a process of its own for each number of rows, all on one CPU core, and they take turns: each round runs a few steps
of every scheduler. Figures are process CPU time, medians over all rounds. Needs no torch.
"""

import argparse
import cProfile
import os
import pstats
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_svc.core.messages.config import MAX_LANES
from tests.measure import many_lanes
from tests.measure.harness import Bar, Measurement, percentiles
from tests.measure.schedulers.__main__ import PEERS
from tests.measure.schedulers.child import Child, ChildFailed, Series
from tests.measure.schedulers.loaded_core import MOST_STEPS, NUM_WAITING, LoadedCore

ROWS = (32, 256, 1024, 4096)
CONTEXT = 512
# Measured and warm-up steps per turn; warm-up replaces the previous process's data in the CPU caches. A turn is as long
# as the core's longest period: it looks at a blocked queue every 32 steps.
_TURN, _WARM = 32, 4
_OTHER_TURNS = {"admit": (4, 1), "pool_full_look": (8, 1)}
# A cold and a cached admission take five steps each, which limits the turns that one core can run.
_MOST_TURNS = MOST_STEPS // (10 * sum(_OTHER_TURNS["admit"]))

# The bars.
STEP_ROWS, STEP_US = 1024, 500.0
PLAN_BYTES, BYTES_PER_ROW = 4096, 4
ADMIT_COLD_US = 200.0
WAITING_ADDS = 0.05
GROWTH_ROWS, GROWTH = 4096, 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One scheduler at one number of rows: the series of figures of each variant."""

    name: str
    rows: int
    note: str
    series: dict[str, Series]


def num_turns(num_steps: int) -> int:
    """Returns the number of rounds that give every variant `num_steps` steps."""
    return -(-num_steps // _TURN)


def measure(children: Sequence[tuple[int, Child]], num_steps: int) -> list[Measured]:
    """Runs all schedulers in turns; the first variant changes from round to round."""
    loaded = [child.loaded() for _, child in children]
    results = [
        Measured(name=child.name, rows=rows, note=info["note"], series={variant: {} for variant in info["variants"]})
        for (rows, child), info in zip(children, loaded, strict=True)
    ]
    for done in range(num_turns(num_steps)):
        for (_, child), result in zip(children, results, strict=True):
            variants = list(result.series)
            first = done % len(variants)
            for variant in variants[first:] + variants[:first]:
                turn, warm = _OTHER_TURNS.get(variant, (_TURN, _WARM))
                child.run(variant, warm)
                for key, values in child.run(variant, turn).items():
                    result.series[variant].setdefault(key, []).extend(values)
    return results


def added(waiting: Sequence[float], without: Sequence[float]) -> float:
    """Returns the fraction that waiting requests add to a step: the median over turns of their ratio of means.

    Means include work that the core does once in many steps.
    """
    means = [np.array(of).reshape(-1, _TURN).mean(axis=1) for of in (waiting, without)]
    return float(np.median(means[0] / means[1])) - 1


def figures(measured: Measured) -> dict[str, Any]:
    """Tandem's line: medians in microseconds and bytes, with p10, p90 and mean under `spread`."""
    series = measured.series
    step, admit = series["step"], series["admit"]
    without = {"rows_taken": step["step_us"], "pool_full": series["rows_free"]["step_us"]}
    waiting = {name: series[f"{name}_waiting"]["step_us"] for name in without}
    adds = {name: added(waiting[name], without[name]) for name in without}
    worst = max(adds, key=adds.__getitem__)
    values = {
        "step_us": step["step_us"],
        "plan_bytes": step["plan_bytes"],
        "encode_us": step["encode_us"],
        "decode_us": step["decode_us"],
        "admit_cold_us": admit["admit_cold_us"],
        "admit_cached_us": admit["admit_cached_us"],
        f"step_us_{NUM_WAITING}_waiting": waiting[worst],
        "hash_us": admit["hash_us"],
        "output_us": step["output_us"],
    }
    if "report_us" in step:
        values["report_us"] = step["report_us"]
    return {
        "scheduler": f"Tandem's core, rows of about {CONTEXT} tokens",
        "rows": measured.rows,
        **{name: float(np.median(of)) for name, of in values.items()},
        "waiting_adds": adds[worst],
        "waiting": {
            name: {
                "step_us": float(np.median(waiting[name])),
                "adds": adds[name],
            }
            for name in waiting
        },
        "step_us_look": float(np.median(series["pool_full_look"]["step_us"])),
        "admit_cached_tokens": float(np.median(admit["admit_cached_tokens"])),
        "plan_bytes_most": max(step["plan_bytes"]),
        "spread": {name: {**percentiles(of, (10, 90)), "mean": float(np.mean(of))} for name, of in values.items()},
    }


def peer_figures(measured: Measured) -> dict[str, Any]:
    """A peer's line: medians of its figures per step."""
    series = measured.series["step"]
    return {
        "peer": measured.name,
        "rows": measured.rows,
        **{name: float(np.median(of)) for name, of in series.items()},
        "spread": {name: {**percentiles(of, (10, 90)), "mean": float(np.mean(of))} for name, of in series.items()},
        "note": measured.note,
    }


def judged(lines: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the bars that the lines have figures for; the worst line counts."""
    by_rows = {line["rows"]: line for line in lines}
    at, many = by_rows.get(STEP_ROWS), by_rows.get(GROWTH_ROWS)
    beside = max(line["plan_bytes_most"] - BYTES_PER_ROW * line["rows"] for line in lines)
    cold = max(line["admit_cold_us"] for line in lines)
    adds = max(line["waiting_adds"] for line in lines)
    bars = [] if at is None else [Bar(name=f"us per step of {STEP_ROWS} rows", value=at["step_us"], limit=STEP_US)]
    bars += [
        Bar(name=f"bytes of a plan beside {BYTES_PER_ROW} per row", value=beside, limit=PLAN_BYTES),
        Bar(name="us of a cold admission", value=cold, limit=ADMIT_COLD_US),
        Bar(name="share that 10,000 waiting requests add to a step", value=adds, limit=WAITING_ADDS),
    ]
    if at is not None and many is not None:
        name = f"a step of {GROWTH_ROWS} rows, of one of {STEP_ROWS}"
        bars.append(Bar(name=name, value=many["step_us"] / at["step_us"], limit=GROWTH))
    return bars


def profile(num_rows: int, num_steps: int) -> None:
    """Profiles the steps and prints the result to stderr."""
    core = LoadedCore(num_rows, CONTEXT, num_steps)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        core.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a bar is missed, 2 if a peer does not run."""
    measurement = Measurement("core")
    measurement.flag("--steps", type=int, default=320, help="measured decode steps per variant")
    measurement.flag("--rows", type=lambda value: [int(rows) for rows in value.split(",")], default=list(ROWS))
    measurement.flag("--lanes", type=int, metavar="N", help="measure a core with N workers of 48 rows instead")
    measurement.flag("--report-steps", action="store_true", help="make the reports of --steps FILE, too")
    measurement.flag("--logprobs", type=int, metavar="K", help="every row requests logprobs with K alternatives")
    measurement.flag("--profile", type=int, metavar="ROWS", help="profile a core with ROWS rows instead")
    measurement.flag("--peer-python", default=sys.executable, help="a Python with the packages that peers import")
    for peer in PEERS:
        measurement.flag(f"--{peer}", type=Path, metavar="DIR", help=f"measure {peer}'s scheduler of this checkout")
    args = measurement.begin(argv)
    if not 1 <= args.steps <= _MOST_TURNS * _TURN:
        measurement.parser.error(f"--steps is {args.steps}; it must be 1 to {_MOST_TURNS * _TURN}")
    if any(not 8 <= rows <= 16_384 for rows in args.rows):
        measurement.parser.error(f"--rows is {args.rows}; each must be 8 to 16384")
    if args.lanes is not None:
        if not 1 <= args.lanes <= MAX_LANES:
            measurement.parser.error(f"--lanes is {args.lanes}; it must be 1 to {MAX_LANES}")
        many_lanes.run(measurement, args.lanes)
        return measurement.exit_code
    if args.profile:
        profile(args.profile, args.steps)
        return 0
    try:
        measured = measure_all(args)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 2
    lines = [figures(of) for of in measured if of.name == "tandem"]
    for line in (*lines, *(peer_figures(of) for of in measured if of.name != "tandem")):
        measurement.line(line)
    measurement.note(f"process CPU time, the garbage collector on, {args.steps} steps of each; numpy {np.__version__}")
    measurement.bar(*judged(lines))
    return measurement.exit_code


def measure_all(args: argparse.Namespace) -> list[Measured]:
    """Measures Tandem and each peer that has a checkout, on one core. Raises ChildFailed."""
    core = max(os.sched_getaffinity(0))
    options = ["--num-logprobs", str(0 if args.logprobs is None else 1 + args.logprobs)]
    options += ["--report-steps"] if args.report_steps else []
    folders = {peer: getattr(args, peer.replace("-", "_")) for peer in PEERS}
    with ExitStack() as stack:
        children: list[tuple[int, Child]] = []
        for rows in args.rows:
            arguments = [str(rows), str(CONTEXT), str(num_turns(args.steps) * (_TURN + _WARM)), str(core)]
            for peer, folder in folders.items():
                if folder is not None:
                    child = Child([peer, *arguments, "--folder", str(folder)], args.peer_python)
                    children.append((rows, stack.enter_context(child)))
            children.append((rows, stack.enter_context(Child(["tandem", *arguments, *options]))))
        return measure(children, args.steps)


if __name__ == "__main__":
    raise SystemExit(main())
