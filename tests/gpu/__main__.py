"""`python -m tests.gpu [PART …]`: the worker's tests and model coverage on a GPU, in parts with a time limit.

Exit code 1 if a part failed or took too long. `make test-gpu` calls it.
"""

import argparse
import subprocess
import sys
import time

from tests.gpu.parts import LIMIT_SECONDS, Part, parts


def main() -> int:
    every = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PART", help=f"default: all of {', '.join(every)}")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in every]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(every)}")
    outcomes = [_run(every[name], arguments.device) for name in arguments.names or every]
    print(f"\n{'part':12} {'seconds':>8}  outcome")
    for name, seconds, outcome in outcomes:
        print(f"{name:12} {seconds:8.1f}  {outcome}")
    return any(outcome != "passed" for _, _, outcome in outcomes)


def _run(part: Part, device: str) -> tuple[str, float, str]:
    print(f"\n== {part.name}", flush=True)
    begun = time.monotonic()
    command = [sys.executable, *(argument.format(device=device) for argument in part.arguments)]
    try:
        code = subprocess.run(command, timeout=LIMIT_SECONDS, check=False).returncode
        outcome = "passed" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        outcome = f"stopped: a part may take {LIMIT_SECONDS} s"
    return part.name, time.monotonic() - begun, outcome


if __name__ == "__main__":
    sys.exit(main())
