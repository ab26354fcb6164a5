"""Runs other people's programs against the gateway: `python -m tests.clients [NAME ...]`. `make clients` installs them.

Owns the service, the gateway and the order. Each program has a script, which runs in the program's own environment.
"""

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.rigs.processes import REPOSITORY, Rig
from tests.rigs.waiting import until

FOLDER = Path(__file__).parent
BUNDLED = REPOSITORY / "gpu_worker" / "bundled" / "model"
NAMES = ("instructor", "pydantic-ai", "litellm", "langchain-openai", "lm-eval", "guidellm", "vllm")
CHECK_SECONDS = 480.0
WORKER = ["gpu_worker", "--exit-with-parent", "--device", "cpu", "--max-rows", "16", "--num-pages", "512"]


def serve(rig: Rig) -> str:
    """Starts the service with the bundled model, and a gateway. Returns the gateway's URL once it serves."""
    rig.start("worker", *WORKER, "--runtime-dir", str(rig.runtime_dir))
    flags = ("--listen", "127.0.0.1:0", "--address", rig.scheduler().address)
    gateway = rig.start("gateway", "tandem_client.gateway", *flags)
    url = gateway.wait_line(r"gateway listening on (\S+)$").group(1)
    until(lambda: is_serving(url), "a service that serves")
    return url


def is_serving(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except urllib.error.HTTPError:
        return False


def check(name: str, url: str) -> str:
    """Runs the script of a program. Returns its last line; raises RuntimeError with its output if it failed."""
    python = REPOSITORY / ".clients" / name / "bin" / "python"
    script = FOLDER / f"check_{name.replace('-', '_')}.py"
    # Nothing of the checkout may be imported, and nothing is downloaded.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "PYTHONPATH"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "any", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), str(script), url, str(BUNDLED)],
        capture_output=True, text=True, timeout=CHECK_SECONDS, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout.strip().rpartition("\n")[2]


def main() -> int:
    """Returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", allow_abbrev=False)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=", ".join(NAMES))
    names, failed = parser.parse_args().names, list[str]()
    with Rig() as rig:
        url = serve(rig)
        for name in names:
            began = time.monotonic()
            try:
                said = check(name, url)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                failed.append(name)
                said = f"FAILED\n{error}"
            print(f"{name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
