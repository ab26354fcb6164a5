"""Lives again, or many of them: `python -m tests.simulation SEED [--operations N] [--seeds N] [--jobs N]`.

Prints how far it is. A seed that fails prints itself, its traceback and the command that replays it; nothing follows.
"""

import argparse
import time
from collections import Counter

from tests.simulation.lives import lives

_PROGRESS_SECONDS = 10.0


def main() -> int:
    """1 where a seed fails; the first one in order is told."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__, allow_abbrev=False)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--operations", type=int, default=1000, help="events of each seed's life (default 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seen", action="store_true", help="tell at the end what happened how often")
    args = parser.parse_args()
    started = told = time.monotonic()
    num_seeds = num_handled = 0
    seen: Counter[str] = Counter()
    with lives(range(args.seed, args.seed + args.seeds), args.operations, args.jobs) as living:
        for life in living:
            if life.failure:
                print(f"{life.failure}\nseed {life.seed} failed after {num_handled + life.num_handled:,} operations")
                return 1
            num_seeds += 1
            num_handled += life.num_handled
            seen += life.seen
            if (now := time.monotonic()) - told > _PROGRESS_SECONDS:
                told = now
                print(
                    f"{num_seeds:,} of {args.seeds:,} seeds, {num_handled:,} operations, {now - started:.0f} s",
                    flush=True,
                )
    if args.seen:
        print("\n".join(f"{count:>12,} {what}" for what, count in sorted(seen.items())))
    print(f"{num_seeds:,} seeds, {num_handled:,} operations, {time.monotonic() - started:.1f} s: all promises held")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
