"""Runs the processes that imitate a card, a few at a time, and passes their progress on.

Owns the processes: each compiles or interprets for itself, because a process imitates one card. Knows no torch.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernels.table import Line

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("bfloat16", "float16")


def measured(cards: list[str]) -> dict[str, list[Line]]:
    """The lines of `measure` for each card, of all dtypes."""
    jobs = [(card, dtype) for card in cards for dtype in DTYPES]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outputs = pool.map(lambda job: run("tests.kernels.measure", *job), jobs)
        lines: dict[str, list[Line]] = {card: [] for card in cards}
        for (card, _), output in zip(jobs, outputs, strict=True):
            lines[card] += [json.loads(line) for line in output.splitlines()]
    # By model, kind and call, as the dtypes of one call stand together in the table.
    order = {id(line): i for card in cards for i, line in enumerate(lines[card])}
    for card in cards:
        first: dict[tuple[str, str], int] = {}
        for line in lines[card]:
            first.setdefault((line["model"], line["kind"]), len(first))
        lines[card].sort(key=lambda line: (first[line["model"], line["kind"]], line["call"], order[id(line)]))
    return lines


def interpreted(names: list[str]) -> list[Line]:
    """The results of `interpret` for these cases."""
    num_processes = len(os.sched_getaffinity(0))
    parts = [names[nth::num_processes] for nth in range(num_processes) if names[nth::num_processes]]
    with ThreadPoolExecutor(num_processes) as pool:
        outputs = list(pool.map(lambda part: run("tests.kernels.interpret", *part, TRITON_INTERPRET="1"), parts))
    return [json.loads(line) for output in outputs for line in output.splitlines()]


def run(module: str, *arguments: str, **environment: str) -> str:
    """The standard output of a module; its standard error is passed on. Raises CalledProcessError if it fails."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout
