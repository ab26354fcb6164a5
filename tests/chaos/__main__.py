"""Chaos with real processes: `python -m tests.chaos [--seed N] [--kills N]`; `--help` lists all flags.

Prints the counts as they grow, and at the end a verdict in one line. The exit code is 1 if a check failed.
"""

import argparse
import secrets
import sys
import time
import traceback
from dataclasses import fields

from tests.chaos.run import Options, chaos
from tests.rigs import processes


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__, allow_abbrev=False)
    for field in fields(Options):
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true")
            continue
        kind = float if field.name == "pace" else int
        parser.add_argument(f"--{field.name}", type=kind, default=None if field.name == "seed" else field.default)
    values = vars(parser.parse_args())
    if values["seed"] is None:
        values["seed"] = secrets.randbelow(1 << 31)
    options = Options(**values)
    processes.may_fork = sys.platform == "linux"
    command = "python -m tests.chaos " + " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items() if value is not False
    )
    print(command, flush=True)
    began = time.monotonic()
    try:
        counts = chaos(options, lambda line: print(line, flush=True))
    except AssertionError as error:
        traceback.print_exc(file=sys.stdout)
        first = (str(error).splitlines() or ["an assertion without words"])[0]
        print(f"chaos FAILED after {time.monotonic() - began:.0f} s: {first}; the same choices again: {command}")
        return 1
    for name, count in sorted(counts.items()):
        print(f"{count:8,d} {name}")
    shown = ", ".join(f"{counts[name]:,d} {name}" for name in _VERDICT)
    print(f"chaos PASSED in {time.monotonic() - began:.0f} s, seed {options.seed}: {shown}")
    return 0


_VERDICT = (
    *("kills of workers with a plan in flight", "hangs", "scheduler deaths", "front-end deaths"),
    *("streams equal to the oracle", "resumes"),
)


if __name__ == "__main__":
    sys.exit(main())
