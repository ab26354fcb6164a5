"""Measures what constraints cost a worker: `python -m tests.measure.constraints`.

One warm runner of the bundled model on a CPU decodes the same number of rows, with and without a constraint, in turns.
The constraint is a JSON schema of an endless list, so that no row ends. Owns the rounds, the bar and the report.
"""

import argparse
import hashlib
import json
import time
from itertools import count
from typing import Any

import llguidance
import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.__main__ import prepared
from gpu_worker.constraints.constraints import Constraints
from gpu_worker.process.ranks import SINGLE
from gpu_worker.settings import BUNDLED_MODEL, WorkerSettings
from gpu_worker.step.runner import Runner
from tests.gpu_worker.plans import TinyCore
from tests.measure.harness import Bar, Measurement, in_turns, spread

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


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of the rounds, in turns: microseconds of a step, and of the worker's CPU time."""
    settings = WorkerSettings(device="cpu", max_rows=arguments.rows, threads=arguments.threads, shared_pool="off")
    runner, _, _ = prepared(settings, BUNDLED_MODEL, time.perf_counter(), SINGLE)
    assert isinstance(runner, Runner) and runner.constraints is not None
    generations = count(1)
    num = arguments.constrained or arguments.rows

    def of(num_constrained: int) -> tuple[float, float]:
        generation = next(generations)
        runner.join(pb.Joined(generation=generation))
        prepare(runner.constraints)
        return steps(runner, arguments.rows, num_constrained, arguments.steps, generation)

    found = in_turns(arguments.rounds, {"plain": lambda: of(0), "constrained": lambda: of(num)})
    runner.constraints.close()
    ratios = [plain / own for (plain, _), (own, _) in zip(found["plain"], found["constrained"], strict=True)]
    return {
        "rows": arguments.rows,
        "constrained_rows": num,
        "step_us": {name: spread([took for took, _ in each]) for name, each in found.items()},
        "cpu_us": {name: spread([cpu for _, cpu in each]) for name, each in found.items()},
        "ratio": spread(ratios),
    }


def main() -> int:
    measurement = Measurement("constraints")
    measurement.flag("--rows", type=int, default=32)
    measurement.flag("--constrained", type=int, default=0, help="rows with a constraint; default: all")
    measurement.flag("--steps", type=int, default=300, help="decode steps of a round")
    measurement.flag("--rounds", type=int, default=7)
    measurement.flag("--threads", type=int, default=None, help="CPU threads of the worker; default: measured")
    figures = measure(measurement.begin())
    measurement.line(figures)
    ratio = figures["ratio"]["median"]
    measurement.bar(Bar(name="tokens per second, of those without constraints", value=ratio, limit=BAR, is_floor=True))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
