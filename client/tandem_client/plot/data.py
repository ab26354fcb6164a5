"""Reads the file that the scheduler's --steps writes: a CSV line per step, lane reset and worker that joined.

Owns the check that a file is a step log. The service's `recording/steps_file.py` documents the columns. Needs numpy.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Kinds of steps, in the order of the table and the legend. A `reset` or `joined` line is not a step.
STEP_KINDS = ("prefill", "decode", "mixed")
RESET, JOINED = "reset", "joined"
# The cause of a reset after which the worker is gone.
WORKER_LOST = "worker lost"

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.str_]
Bools = npt.NDArray[np.bool_]


class StepsFileError(ValueError):
    """The file cannot be plotted; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepsLog:
    """The lines of a file, in order, as one array per column; `is_step` is false for resets and joins."""

    path: Path
    is_step: Bools
    # The columns, as they are named in the file.
    kind: Words
    cause: Words
    step: Floats
    at_seconds: Floats
    waiting: Floats
    tokens: Floats
    output_tokens: Floats
    preemptions: Floats
    lane: Floats
    ms: Floats
    span_ms: Floats
    workers: Floats
    all_running: Floats
    all_pages_used: Floats
    all_pages_cached: Floats
    all_pages_total: Floats

    @property
    def seconds(self) -> Floats:
        """The time of each line since the first line's step began."""
        return self.at_seconds - (self.at_seconds[0] - self.ms[0] / 1e3)


_TYPES: list[tuple[str, Any]] = [
    (column.name, "U16" if column.name in ("kind", "cause") else float)
    for column in fields(StepsLog)
    if column.name not in ("path", "is_step")
]


def read_steps(path: Path) -> StepsLog:
    """Raises StepsFileError if the file is not a step log or has no step yet, OSError if it cannot be read.

    A last line without its end is left out, because the service may be writing it.
    """
    header, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] or [""]
    names = header.split(",")
    if missing := [name for name, _ in _TYPES if name not in names]:
        raise StepsFileError(f"{path} has no column {missing[0]}: it is not a step log, or an older service wrote it")
    wanted = [names.index(name) for name, _ in _TYPES]
    try:
        table = np.loadtxt(lines, _TYPES, comments=None, delimiter=",", usecols=wanted, ndmin=1) if lines else None
    except ValueError as error:
        raise StepsFileError(f"{path}: {error}") from None
    if table is None or not (is_step := np.isin(table["kind"], STEP_KINDS)).any():
        raise StepsFileError(f"{path} has no step yet: the service writes steps once a second")
    return StepsLog(path=path, is_step=is_step, **{name: table[name] for name, _ in _TYPES})
