"""Runs one scheduler in a process of its own: `python -m tests.measure.schedulers NAME ROWS CONTEXT STEPS CORE`.

Owns the child's side of the exchange with `child.py`: a line of JSON once the scheduler is loaded, then one for each
input line `VARIANT TIMES`. Imports the named scheduler only, so that only a peer's process loads torch.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
from pathlib import Path

PEERS = {"nano-vllm": "nano_vllm", "mini-sglang": "mini_sglang", "vllm": "vllm_v1"}


def main() -> None:
    """Loads the scheduler and serves until its input ends."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.schedulers", allow_abbrev=False)
    parser.add_argument("name", choices=["tandem", *PEERS])
    parser.add_argument("rows", type=int)
    parser.add_argument("context", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("core", type=int, help="the CPU core that the process is pinned to")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--report-steps", action="store_true")
    parser.add_argument("--num-logprobs", type=int, default=0)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    answers = sys.stdout
    # A peer's own output goes to stderr, because stdout carries the answers.
    with contextlib.redirect_stdout(sys.stderr):
        if args.name == "tandem":
            from tests.measure.schedulers.tandem import Tandem

            scheduler = Tandem(
                args.rows, args.context, args.steps, num_logprobs=args.num_logprobs, report_steps=args.report_steps
            )
        else:
            module = importlib.import_module(f"tests.measure.schedulers.{PEERS[args.name]}")
            scheduler = module.Peer(args.folder.resolve(), args.rows, args.context, args.steps)
        gc.collect()
        print(json.dumps({"variants": scheduler.variants, "note": scheduler.note}), file=answers, flush=True)
        for line in sys.stdin:
            variant, times = line.split()
            print(json.dumps(scheduler.run(variant, int(times))), file=answers, flush=True)


if __name__ == "__main__":
    main()
