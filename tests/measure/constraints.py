"""Measures what constraints cost a worker: `python -m tests.measure.constraints`.

One warm runner of the bundled model on a CPU decodes the same number of rows, with and without a constraint, in turns.
The constraint is a JSON schema of an endless list, so that no row ends. Owns the rounds, the bar and the report.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import llguidance
import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.__main__ import prepared
from gpu_worker.constraints.constraints import Constraints
from gpu_worker.process.ranks import SINGLE
from gpu_worker.settings import BUNDLED_MODEL, WorkerSettings
from gpu_worker.step.runner import Runner
from tests.gpu_worker.plans import TinyCore
from tests.measure.machine import description

# Tokens per second with constraints, as a share of those without.
BAR = 0.9
_PROMPT, _WARM_UP = 32, 10
_SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}
SOURCE = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_SCHEMA)).encode()
HASH = hashlib.sha256(SOURCE).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the rounds; times are of a step, in microseconds."""

    rows: int
    constrained_rows: int
    plain_us: float
    constrained_us: float
    # CPU time of the worker's process.
    plain_cpu_us: float
    constrained_cpu_us: float
    # Of each round, then their median.
    ratios: list[float]
    ratio: float


def steps(runner: Runner, num_rows: int, num_constrained: int, num_steps: int, generation: int) -> tuple[float, float]:
    """Microseconds of a decode step, and of CPU time."""
    core = TinyCore(runner.geometry, generation=generation)
    rng = np.random.default_rng(7)
    rows = list(range(1, num_rows + 1))
    for row in rows:
        core.add(row, rng.integers(0, 4000, _PROMPT).tolist(), temperature=0.9, seed=row)
    for first in range(0, num_rows, 4):
        part = rows[first : first + 4]
        plan = core.plan(chunks=dict.fromkeys(part, _PROMPT))
        hashes = [HASH if row <= num_constrained else bytes(32) for row in part]
        plan.started.constraints = b"".join(hashes) if num_constrained else b""
        _run(runner, core, plan)
    for _ in range(_WARM_UP):
        _run(runner, core, core.plan(decode=rows))
    begun, cpu_begun = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        _run(runner, core, core.plan(decode=rows))
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    return seconds / num_steps * 1e6, cpu_seconds / num_steps * 1e6


def _run(runner: Runner, core: TinyCore, plan: pb.StepPlan) -> None:
    runner.submit(plan)
    outcome = runner.collect()
    assert outcome is not None and outcome.status == pb.STEP_STATUS_OK, outcome
    assert not outcome.constraint_failed.size and not outcome.constraint_complete.size, outcome.constraint_detail
    core.learn(outcome.tokens)


def prepare(constraints: Constraints) -> None:
    """Returns when rows may have the constraint."""
    constraints.prepare(HASH, SOURCE)
    while not (answers := constraints.answers()):
        time.sleep(0.001)
    assert answers == [(HASH, "")], answers


def measure(arguments: argparse.Namespace) -> Figures:
    """The rounds, in turns."""
    settings = WorkerSettings(device="cpu", max_rows=arguments.rows, threads=arguments.threads, shared_pool="off")
    runner, _, _ = prepared(settings, BUNDLED_MODEL, time.perf_counter(), SINGLE)
    assert isinstance(runner, Runner) and runner.constraints is not None
    plain: list[tuple[float, float]] = []
    constrained: list[tuple[float, float]] = []
    num = arguments.constrained or arguments.rows
    for number in range(arguments.rounds):
        runner.join(pb.Joined(generation=2 * number + 1))
        prepare(runner.constraints)
        for found, count, generation in ((plain, 0, 2 * number + 1), (constrained, num, 2 * number + 2)):
            found.append(steps(runner, arguments.rows, count, arguments.steps, generation))
    runner.constraints.close()
    ratios = [before / after for (before, _), (after, _) in zip(plain, constrained, strict=True)]
    both = [*zip(*plain, strict=True), *zip(*constrained, strict=True)]
    times = [round(statistics.median(column), 1) for column in both]
    return Figures(
        rows=arguments.rows,
        constrained_rows=num,
        plain_us=times[0],
        constrained_us=times[2],
        plain_cpu_us=times[1],
        constrained_cpu_us=times[3],
        ratios=[round(ratio, 3) for ratio in ratios],
        ratio=round(statistics.median(ratios), 3),
    )


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if the bar was missed."""
    parser = argparse.ArgumentParser(prog="tests.measure.constraints")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--constrained", type=int, default=0, help="rows with a constraint; default: all")
    parser.add_argument("--steps", type=int, default=300, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of the worker; default: measured")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    figures = measure(given)
    if given.json:
        print(json.dumps({"machine": description(), **asdict(figures)}))
    else:
        print(description())
        print(f"{figures.rows} rows, {figures.constrained_rows} with a constraint:")
        print(f"  a step: {figures.plain_us:.0f} us without constraints, {figures.constrained_us:.0f} us with them")
        print(f"  CPU time of the worker: {figures.plain_cpu_us:.0f} us and {figures.constrained_cpu_us:.0f} us")
        print(f"  tokens per second: {figures.ratio:.3f} of those without (bar {BAR}); rounds {figures.ratios}")
    return 0 if figures.ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
