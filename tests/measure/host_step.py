"""Measures the host's part of a worker's decode step: `python -m tests.measure.host_step [--json] [--against DIR]`.

Owns the rounds, the phases and the output; `host_step_load.py` has the load. A step parses the plan's frame, checks and
applies the plan, lays it out, fills the staging buffer, and turns the tokens into the frame of a result. Figures are
process CPU time of one thread, medians over steps.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.layout.row_tables import RowTables
from gpu_worker.step import runner as runner_module
from gpu_worker.step.runner import Runner
from gpu_worker.step.staging import Staging
from gpu_worker.wire.frames import parse_frame, result_frame
from tests.measure.host_step_load import MOST_STEPS, Load, make_frames, make_runner, without_cuda
from tests.measure.machine import description
from tests.measure.percentiles import percentiles

# Unmeasured steps, and steps per turn.
_WARM, _TURN = 20, 10
# A phase's name in the report, and the function that is the phase.
_PHASES = (
    ("read_plan", runner_module, "read_plan"),
    ("tables.apply", RowTables, "apply"),
    ("tables.check", RowTables, "check"),
    ("lay_out", runner_module, "lay_out"),
    ("tables.advance", RowTables, "advance"),
    ("staging", Staging, "upload"),
)


def run_step(runner: Runner, frame: bytes) -> bytes:
    """What the worker's loop does for a plan and its result."""
    runner.submit(parse_frame(frame).plan)
    outcome = runner.collect(wait=False)
    assert outcome is not None, "the plan is still in flight"
    assert outcome.status == pb.STEP_STATUS_OK, f"step {outcome.step}: {outcome.detail}"
    return result_frame(outcome)


@contextmanager
def _timed_phases(spent: dict[str, list[float]]) -> Generator[None]:
    """Adds the time of each phase's calls. The two readings of the clock cost about a microsecond in each."""

    def timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begun = time.process_time_ns()
            result = call(*args, **options)
            into.append((time.process_time_ns() - begun) / 1e3)
            return result

        return run

    patches = [
        patch.object(owner, name, timed(getattr(owner, name), spent.setdefault(label, [])))
        for label, owner, name in _PHASES
        if hasattr(owner, name)
    ]
    own = sys.modules[__name__]
    for name in ("parse_frame", "result_frame"):
        patches.append(patch.object(own, name, timed(getattr(own, name), spent.setdefault(name, []))))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def measure(num_rows: int, load: Load, num_steps: int) -> dict[str, Any]:
    """Returns the figures of one load: steps without phases take turns with steps whose phases are timed."""
    runner, num_turns = make_runner(num_rows), -(-num_steps // _TURN)
    frames = iter(make_frames(runner.geometry, load, _WARM + 2 * num_turns * _TURN))
    spent: list[float] = []
    phases: dict[str, list[float]] = {}
    with without_cuda():
        runner.join(pb.Joined(generation=1))
        for _ in range(_WARM):
            run_step(runner, next(frames))
        gc.collect()
        for _ in range(num_turns):
            for _ in range(_TURN):
                frame = next(frames)
                begun = time.process_time_ns()
                run_step(runner, frame)
                spent.append((time.process_time_ns() - begun) / 1e3)
            with _timed_phases(phases):
                for _ in range(_TURN):
                    run_step(runner, next(frames))
    return {
        "load": load.name,
        "rows": num_rows,
        "step_us": float(np.median(spent)),
        "spread": percentiles(spent, (10, 90)),
        "phases": {label: float(np.median(of)) for label, of in phases.items() if of},
    }


def compare(folder: Path, arguments: Sequence[str], num_repeats: int) -> list[dict[str, Any]]:
    """Runs the benchmark of the checkout in `folder` and this one in turns. Returns a line per load, with medians."""
    own = Path(__file__).resolve().parents[2]
    found: dict[Path, list[list[dict[str, Any]]]] = {folder.resolve(): [], own: []}
    for _ in range(num_repeats):
        for root, runs in found.items():
            # The other checkout may have no generated stubs; the protocol is the same.
            paths = (root, root / "client", root / "protos", root / ".stubs", own / ".stubs")
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
            command = [sys.executable, "-m", "tests.measure.host_step", "--json", *arguments]
            done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            runs.append([json.loads(line) for line in done.stdout.splitlines()])
    lines: list[dict[str, Any]] = []
    before, after = found.values()
    for i, first in enumerate(after[0]):
        then, now = ([run[i]["step_us"] for run in runs] for runs in (before, after))
        medians = {"before_us": float(np.median(then)), "after_us": float(np.median(now))}
        ratio = medians["after_us"] / medians["before_us"]
        lines.append({"load": first["load"], "rows": first["rows"], **medians, "ratio": ratio, "runs": [then, now]})
    return lines


def report(line: dict[str, Any]) -> Iterator[str]:
    """Yields the figures of one load as text."""
    yield "{load}, {rows} rows: {step_us:.0f} us (p10 {p10:.0f}, p90 {p90:.0f})".format(**line, **line["spread"])
    for label, micros in line["phases"].items():
        yield f"  {label:<16}{micros:7.1f} us"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures. Without --against it pins this process to one core."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.host_step", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200, help="measured steps per load")
    parser.add_argument("--mixed", action="store_true", help="the last row computes chunks of prompts")
    parser.add_argument("--against", type=Path, metavar="DIR", help="compare with this checkout, in turns")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each checkout, with --against")
    args = parser.parse_args(argv)
    most = (MOST_STEPS - _WARM) // 2 - _TURN
    if not 1 <= args.steps <= most:
        parser.error(f"--steps is {args.steps}; it must be 1 to {most}")
    if args.against is not None:
        arguments = [f"--rows={args.rows}", f"--steps={args.steps}", *(["--mixed"] if args.mixed else [])]
        for line in compare(args.against, arguments, args.repeats):
            text = "{load}, {rows} rows: {before_us:.0f} -> {after_us:.0f} us, ratio {ratio:.3f}".format(**line)
            print(json.dumps(line) if args.json else text)
        return 0
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for draws in (False, True):
        line = measure(args.rows, Load(draws=draws, mixed=args.mixed), args.steps)
        print(json.dumps(line) if args.json else "\n".join(report(line)))
    if not args.json:
        about = description()
        versions = f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
        print(f"{about['cpu']}, load {about['load_1min']}; {versions}; process CPU time, {args.steps} steps of each")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
