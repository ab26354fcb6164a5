"""Hostile bytes for every entrance of the service: `python -m tests.fuzz [--seed N]`; `--help` lists all flags.

Prints each entrance with the number of messages, the outcomes and the time. The exit code is 1 if a check failed.
"""

import argparse
import secrets
import sys

from tests.fuzz.run import fuzz_door, fuzz_frames, fuzz_methods


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--calls", type=int, default=100_000, help="messages to each gRPC method")
    parser.add_argument("--door-calls", type=int, default=10_000, help="those over TLS with random metadata")
    parser.add_argument("--frames", type=int, default=1_000_000, help="internal frames, all kinds together")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    command = (
        f"python -m tests.fuzz --seed {seed} --calls {args.calls} --door-calls {args.door_calls} --frames {args.frames}"
    )
    print(command, flush=True)

    def report(line: str) -> None:
        print(line, flush=True)

    try:
        num_frames = fuzz_frames(args.frames, seed, report) if args.frames else 0
        num_calls = fuzz_methods(args.calls, seed, report) if args.calls else 0
        num_calls += fuzz_door(args.door_calls, seed, report) if args.door_calls else 0
    except BaseException:
        print(f"fuzz FAILED; the same messages again: {command}", flush=True)
        raise
    print(f"fuzz PASSED, seed {seed}: {num_frames:,} internal frames and {num_calls:,} messages to gRPC methods")
    return 0


if __name__ == "__main__":
    sys.exit(main())
