"""Replays one seed, or runs many: `python -m tests.simulation SEED [--operations N] [--seeds N] [--jobs N]`.

Prints its progress. If a seed fails, prints the seed, its traceback and the command that replays it, then stops.
"""

import argparse
import time
from collections import Counter

from tests.simulation.runs import runs

_PROGRESS_SECONDS = 10.0


def main() -> int:
    """Returns 1 if a seed fails, after printing the first such seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__, allow_abbrev=False)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--operations", type=int, default=1000, help="events per seed (default 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="number of consecutive seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seen", action="store_true", help="print at the end how often each kind of event occurred")
    args = parser.parse_args()
    started = last_printed = time.monotonic()
    num_seeds = num_handled = 0
    seen: Counter[str] = Counter()
    with runs(range(args.seed, args.seed + args.seeds), args.operations, args.jobs) as results:
        for run in results:
            if run.failure:
                print(f"{run.failure}\nseed {run.seed} failed after {num_handled + run.num_handled:,} operations")
                return 1
            num_seeds += 1
            num_handled += run.num_handled
            seen += run.seen
            if (now := time.monotonic()) - last_printed > _PROGRESS_SECONDS:
                last_printed = now
                print(
                    f"{num_seeds:,} of {args.seeds:,} seeds, {num_handled:,} operations, {now - started:.0f} s",
                    flush=True,
                )
    if args.seen:
        print("\n".join(f"{count:>12,} {event}" for event, count in sorted(seen.items())))
    print(f"{num_seeds:,} seeds, {num_handled:,} operations, {time.monotonic() - started:.1f} s: all checks passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
