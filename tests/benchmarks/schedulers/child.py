"""A scheduler's process, seen by whoever measures: start, ask, end.

Owns the child. Only the one that is asked runs; the others wait for their input, so all may share one CPU core.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Series = dict[str, list[float]]
_ROOT = Path(__file__).parents[3]


class ChildFailed(RuntimeError):
    """It ended without an answer; its own words are on stderr."""


class Child:
    """One scheduler with so many rows. A context manager: the process ends with it."""

    def __init__(self, arguments: Sequence[str], python: str = sys.executable) -> None:
        self.name = arguments[0]
        self._process = subprocess.Popen(
            [python, "-m", "tests.benchmarks.schedulers", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )

    def loaded(self) -> dict[str, Any]:
        """What it says of itself once its rows run; several children may load at a time. Raises ChildFailed."""
        return self._answer()

    def run(self, variant: str, times: int) -> Series:
        """Its figures of so many repetitions. Raises ChildFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{variant} {times}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{self.name} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
