"""`tandem serve` on a CPU as a process of its own; its log is printed if the measurement fails."""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.processes import REPOSITORY, child_environment, free_address


@contextmanager
def served(folder: Path, *flags: str) -> Generator[str]:
    """Runs the service with these flags until the end of the block. Yields its address; it may not listen yet."""
    address, log = free_address(), folder / "serve.log"
    command = [sys.executable, "-m", "tandem_client.cli", "serve", "--listen", address, "--device", "cpu"]
    command += ["--runtime-dir", str(folder), *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=REPOSITORY, env=child_environment(), stdin=subprocess.DEVNULL
        )
    try:
        yield address
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait()
