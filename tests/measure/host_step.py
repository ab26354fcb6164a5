"""Measures the host's part of a worker's decode step: `python -m tests.measure.host_step [--json]`.

Owns the rounds, the phases and the output; `host_step_load.py` has the load. A step parses the plan's frame, checks and
applies the plan, lays it out, fills the staging buffer, and turns the tokens into the frame of a result. Figures are
process CPU time of one thread, medians over steps.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.cuda.staging import Staging
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.step import runner as runner_module
from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import parse_frame, result_frame
from tests.measure.harness import Measurement, percentiles
from tests.measure.host_step_load import MOST_STEPS, Load, make_frames, make_runner

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
    """Returns the figures of one load: steps with timed phases take turns with steps without."""
    runner, num_turns = make_runner(num_rows), -(-num_steps // _TURN)
    frames = iter(make_frames(runner.geometry, load, _WARM + 2 * num_turns * _TURN))
    spent: list[float] = []
    phases: dict[str, list[float]] = {}
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
        "phases_us": {label: float(np.median(of)) for label, of in phases.items() if of},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures. Pins this process to one core."""
    measurement = Measurement("host_step")
    measurement.flag("--rows", type=int, default=256)
    measurement.flag("--steps", type=int, default=200, help="measured steps per load")
    measurement.flag("--mixed", action="store_true", help="the last row computes chunks of prompts")
    args = measurement.begin(argv)
    most = (MOST_STEPS - _WARM) // 2 - _TURN
    if not 1 <= args.steps <= most:
        measurement.parser.error(f"--steps is {args.steps}; it must be 1 to {most}")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for draws in (False, True):
        measurement.line(measure(args.rows, Load(draws=draws, mixed=args.mixed), args.steps))
    measurement.note(f"process CPU time, {args.steps} steps of each; numpy {np.__version__}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
