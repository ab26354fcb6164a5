"""Runs the processes that imitate a card, a few at a time, and passes their progress on.

Owns the processes: each compiles or interprets for itself, because a process imitates one card. Knows no torch.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernels.cards import Card
from tests.kernels.table import Line

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("bfloat16", "float16")


def measured(card: Card) -> list[Line]:
    """The lines of `measure` for a card: by model and kind, decode calls and then prefill calls of each dtype."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outputs = list(pool.map(lambda dtype: run("tests.kernels.measure", card.key, dtype), DTYPES))
    lines: list[Line] = [json.loads(line) for output in outputs for line in output.splitlines()]
    kinds = list(dict.fromkeys((line["model"], line["kind"]) for line in lines))
    # The sort is stable: buckets stay in order.
    return sorted(lines, key=lambda line: (kinds.index((line["model"], line["kind"])), line["call"]))


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
