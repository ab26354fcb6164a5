"""`tandem serve` on a CPU as a process of its own; its log is printed if the measurement fails."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.processes import Child, free_address


@contextmanager
def serving(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> Generator[Child]:
    """Runs the service with these flags until the end of the block. Yields its process."""
    words = ["tandem_client.cli", "serve", "--runtime-dir", str(folder), *flags]
    serve = Child("serve", words, environment=environment)
    try:
        yield serve
    except BaseException:
        print(serve.output(), file=sys.stderr)
        raise
    finally:
        serve.terminate()


@contextmanager
def served(folder: Path, *flags: str) -> Generator[str]:
    """Yields the service's address; it may not listen yet."""
    address = free_address()
    with serving(folder, "--listen", address, "--device", "cpu", *flags):
        yield address
