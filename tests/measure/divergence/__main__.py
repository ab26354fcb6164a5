"""Measures how often sampled text differs from the same request run alone: `python -m tests.measure.divergence`.

Every round sends the same requests: one after another, again, batched, with a worker kill in the middle, and with a
pool so small that requests are preempted. Floating-point sums differ between batches, chunks and kernels, so a nearly
tied sample may change; after it the text differs. Owns the command and the order of its parts.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.measure.divergence.compare import Answer, compare
from tests.measure.divergence.greedy import measure_greedy
from tests.measure.divergence.rounds import BUNDLED, KERNELS, SAMPLED, Requests, WorkerKind, measure
from tests.measure.harness import Measurement
from tests.measure.workload import model_folder
from tests.rigs.processes import REPOSITORY


def main() -> int:
    """Returns 0 if every round met its condition."""
    measurement = Measurement("divergence")
    measurement.flag("--prompts", type=int, default=64, help="number of bundled prompts (64)")
    measurement.flag("--new-tokens", type=int, default=64, help="new tokens per prompt (64)")
    measurement.flag("--model", type=Path, help="default: the bundled model; greedy also that of make bench")
    measurement.flag("--device", default="cpu")
    measurement.flag("--parts", nargs="+", choices=("sampled", "greedy"), default=["sampled", "greedy"])
    measurement.flag("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    measurement.flag("--kernels", nargs="+", choices=KERNELS, help="all on a CPU, torch on other devices")
    args = measurement.begin()
    if args.prompts < 1:
        measurement.parser.error(f"--prompts is {args.prompts}; it must be at least 1")
    kernels: list[str] = args.kernels or ([*KERNELS] if args.device == "cpu" else ["torch"])
    lines = (REPOSITORY / "tests" / "bundled_recipe" / "prompts.txt").read_text().splitlines()
    count = min(args.prompts, len(lines))
    texts = tuple(lines[i * len(lines) // count] for i in range(count))
    missed = _sampled(measurement, args, kernels, texts) if "sampled" in args.parts else []
    if "greedy" in args.parts:
        for model in [args.model] if args.model else [BUNDLED / "model", model_folder()]:
            error = measure_greedy(model, texts, args.new_tokens, device=args.device, kernel=kernels[-1])
            measurement.line({"greedy": "bfloat16 against float32", **dataclasses.asdict(error)})
    if missed:
        print(f"no stream met {', '.join(missed)}; increase --prompts or --new-tokens", file=sys.stderr)
    return 1 if missed else 0


def _sampled(
    measurement: Measurement, args: argparse.Namespace, kernels: Sequence[str], texts: tuple[str, ...]
) -> list[str]:
    """Prints the rounds of each dtype and kernel. Returns those that did not meet their condition."""
    requests = Requests(texts=texts, new_tokens=args.new_tokens, options=SAMPLED)
    missed: list[str] = []
    for dtype in args.dtypes:
        answers: dict[str, list[Answer]] = {}
        for kernel in kernels:
            model = args.model or BUNDLED / "model"
            worker = WorkerKind(model=model, device=args.device, dtype=dtype, kernel=kernel)
            alone, differences = measure(requests, worker)
            differences += [compare(f"as {other}", then, alone) for other, then in answers.items()]
            answers[kernel] = alone
            for one in differences:
                rate = one.diverged / one.streams
                measurement.row({"dtype": dtype, "kernel": kernel, **dataclasses.asdict(one), "rate": rate})
                if {"worker killed": one.interrupted, "preempted": one.preempted}.get(one.name) == 0:
                    missed.append(f"{dtype} {kernel}: {one.name}")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
