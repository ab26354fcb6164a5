"""Measures model coverage: `python -m tests.census [NAME …]`. Exit code 1 if a class is neither served nor refused."""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parents[2] / ".inductor_cache"))

import torch

from gpu_worker.native import library
from gpu_worker.native.build import INSTRUCTION_SETS
from tests.census.case import Outcome, Result, quiet, run_case
from tests.census.groups import run_groups
from tests.census.population import population
from tests.census.table import counts, table, write_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.census", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--instructions",
        choices=[each.name for each in INSTRUCTION_SETS],
        help="the instruction set of the C++ kernels; default: the machine's best",
    )
    parser.add_argument("--write", action="store_true", help="put the table into gpu_worker/README.md")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth of them, from the Kth; default: all")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share each model, over gloo; default: 1")
    parser.add_argument("--kv-heads", type=int, default=0, help="KV heads of the models that ranks share; default: 2")
    arguments = parser.parse_args()
    first, _, step = arguments.part.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        parser.error(f"--part is {arguments.part}; it must be K/N with K from 1 to N")
    if arguments.write and (arguments.names or arguments.part != "1/1"):
        parser.error("--write takes the whole census, not some of it")
    quiet()
    torch.set_num_threads(1)
    if arguments.instructions:
        [chosen_set] = [each for each in INSTRUCTION_SETS if each.name == arguments.instructions]
        library.best_instruction_set = lambda _: chosen_set
    members = population()
    if unknown := set(arguments.names) - {member.model_type for member in members}:
        parser.error(f"no causal-LM class of this Transformers is called {', '.join(sorted(unknown))}")
    members = [member for member in members if not arguments.names or member.model_type in arguments.names]
    chosen = [member for member in members if member.declares][int(first) - 1 :: int(step)]
    if arguments.ranks > 1:
        return run_groups(
            [member.model_type for member in chosen], arguments.ranks, arguments.kv_heads, write=arguments.write
        )
    outcomes: list[Outcome] = []
    for i, member in enumerate(chosen):
        begun = time.perf_counter()
        outcome = run_case(member, torch.device(arguments.device), getattr(torch, arguments.dtype))
        outcomes.append(outcome)
        seconds = time.perf_counter() - begun
        told = f"{outcome.kind}: {outcome.detail}"
        line = f"{i + 1:3}/{len(chosen)} {member.model_type:26} {outcome.result:8} {seconds:5.1f} s  {told}"
        print(line, flush=True)
    undeclared = [member for member in members if not member.declares]
    print(f"\n{counts(outcomes, undeclared)}\n\n{table(outcomes, undeclared)}")
    if arguments.write:
        write_table(outcomes, undeclared)
    return any(outcome.result is Result.FAILED for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
