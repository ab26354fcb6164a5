"""`python -m tests.gpu [PART …]`: the worker's tests and model coverage on a GPU, in parts with a time limit.

With `--jobs` parts run beside each other, each with its own context of the device: most of their time is compilation.
What a part prints is shown when it ends. Exit code 1 if a part failed or took too long. `make test-gpu` calls it.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.gpu.parts import LIMIT_SECONDS, Part, parts

_LAST_WORDS_SECONDS = 10.0


def main() -> int:
    every = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PART", help=f"default: all of {', '.join(every)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at once; default: 1")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in every]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(every)}")
    chosen = [every[name] for name in arguments.names or every]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(partial(_run, device=arguments.device), chosen))
    print(f"\n{'part':12} {'seconds':>8}  outcome")
    for name, seconds, outcome in outcomes:
        print(f"{name:12} {seconds:8.1f}  {outcome}")
    return any(outcome != "passed" for _, _, outcome in outcomes)


def _run(part: Part, device: str) -> tuple[str, float, str]:
    begun = time.monotonic()
    command = [sys.executable, *(argument.format(device=device) for argument in part.arguments)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
            outcome = _outcome(process)
        output.seek(0)
        seconds = time.monotonic() - begun
        print(f"\n== {part.name}\n{output.read()}== {part.name}: {outcome}, {seconds:.0f} s", flush=True)
    return part.name, seconds, outcome


def _outcome(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a part, or ends it at its limit: pytest prints the failures until then."""
    try:
        code = process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        return f"stopped: a part may take {LIMIT_SECONDS} s"
    return "passed" if code == 0 else f"failed with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
