"""The parent's side of a scheduler's process: start, request, end.

Owns the child. Only the child with a request runs; the others wait for input, so all may share one CPU core.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Series = dict[str, list[float]]
_ROOT = Path(__file__).parents[3]


class ChildFailed(RuntimeError):
    """The child ended without an answer; its output is on stderr."""


class Child:
    """A scheduler with a given number of rows. A context manager: the process ends with it."""

    def __init__(self, arguments: Sequence[str], python: str = sys.executable) -> None:
        self.name = arguments[0]
        self._process = subprocess.Popen(
            [python, "-m", "tests.measure.schedulers", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )

    def loaded(self) -> dict[str, Any]:
        """Waits until the scheduler's rows run; several children may load at once. Raises ChildFailed."""
        return self._answer()

    def run(self, variant: str, times: int) -> Series:
        """Runs a variant `times` times. Returns its figures. Raises ChildFailed."""
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

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
