"""Reads the file that the scheduler's --steps writes: a CSV line per step, lane reset and worker that joined.

Owns what a file must be to be drawn, and the words for what is wrong with it. Knows nothing of how it is drawn.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

# Kinds of steps, then of marks between them.
DECODE = "decode"
STEP_KINDS = ("prefill", DECODE, "mixed")
RESET, JOINED = "reset", "joined"
# The cause of a reset after which the worker is gone.
WORKER_LOST = "worker lost"
KINDS = (*STEP_KINDS, RESET, JOINED)
NUMBERS = (
    "step",
    "at_seconds",
    "running",
    "waiting",
    "tokens",
    "output_tokens",
    "pages_used",
    "pages_cached",
    "pages_total",
    "preemptions",
    "lane",
    "ms",
    "span_ms",
)
_WORDS = ("kind", "cause")
# Beyond any honest value; a sum of squares of such is finite still.
_MOST = 1e15
# Of the header and of a line, in characters.
_LONGEST_LINE = 4096


class StepsFileError(ValueError):
    """The file cannot be drawn; the message names the file, and line and column where one is at fault."""


def _numbers() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsLog:
    """The file's lines as columns of equal length; `kinds` are indices into KINDS, `causes` by line, of resets alone.

    `left_out` is 1 where the last line was cut short: the service still writes, or was killed.
    """

    path: Path
    kinds: bytearray = field(default_factory=bytearray)
    causes: dict[int, str] = field(default_factory=dict[int, str])
    step: "array[float]" = field(default_factory=_numbers)
    at_seconds: "array[float]" = field(default_factory=_numbers)
    running: "array[float]" = field(default_factory=_numbers)
    waiting: "array[float]" = field(default_factory=_numbers)
    tokens: "array[float]" = field(default_factory=_numbers)
    output_tokens: "array[float]" = field(default_factory=_numbers)
    pages_used: "array[float]" = field(default_factory=_numbers)
    pages_cached: "array[float]" = field(default_factory=_numbers)
    pages_total: "array[float]" = field(default_factory=_numbers)
    preemptions: "array[float]" = field(default_factory=_numbers)
    lane: "array[float]" = field(default_factory=_numbers)
    ms: "array[float]" = field(default_factory=_numbers)
    span_ms: "array[float]" = field(default_factory=_numbers)
    left_out: int = 0

    @property
    def num_steps(self) -> int:
        """Lines that are steps."""
        return sum(self.kinds.count(i) for i in range(len(STEP_KINDS)))


def read_steps(path: Path) -> StepsLog:
    """Raises StepsFileError if it is not a step log or has no step yet, OSError if it cannot be read."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        header = file.readline(_LONGEST_LINE)
        if not header:
            raise StepsFileError(f"{path} is empty: the service writes its header at once, so this is another file")
        log = _read_lines(path, file, header.rstrip("\r\n").split(","))
    if not log.num_steps:
        raise StepsFileError(f"{path} has no step yet: the service writes them once a second")
    return log


def _read_lines(path: Path, file: TextIO, names: list[str]) -> StepsLog:
    missing = [name for name in (*NUMBERS, *_WORDS) if name not in names]
    if missing:
        raise StepsFileError(f"{path}, line 1: there is no column {missing[0]}: no file that --steps wrote")
    log = StepsLog(path=path)
    kind_at, cause_at = names.index("kind"), names.index("cause")
    wanted = [names.index(name) for name in NUMBERS]
    takes: list[Callable[[float], None]] = [getattr(log, name).append for name in NUMBERS]
    kind_index = {name: i for i, name in enumerate(KINDS)}
    first_mark = len(STEP_KINDS)
    number = 1
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if line[-1] != "\n" and len(line) < _LONGEST_LINE:
            return _cut(log)
        cells = line.rstrip("\r\n").split(",")
        try:
            kind = kind_index[cells[kind_at]]
            values = [float(cells[i]) for i in wanted]
            if min(values) < 0 or not sum(values) < _MOST or len(cells) != len(names):
                raise ValueError
        except (ValueError, KeyError, IndexError):
            raise StepsFileError(f"{path}, line {number}{_what_is_wrong(cells, names)}") from None
        log.kinds.append(kind)
        for take, value in zip(takes, values, strict=True):
            take(value)
        if kind >= first_mark:
            log.causes[len(log.kinds) - 1] = cells[cause_at]
    return log


def _cut(log: StepsLog) -> StepsLog:
    columns = {name: getattr(log, name) for name in NUMBERS}
    return StepsLog(path=log.path, kinds=log.kinds, causes=log.causes, left_out=1, **columns)


def _what_is_wrong(cells: list[str], names: list[str]) -> str:
    if len(cells) != len(names):
        return f": it has {len(cells)} columns, the header {len(names)}"
    cell = dict(zip(names, cells, strict=True))
    if cell["kind"] not in KINDS:
        return f", column kind: {_shown(cell['kind'])} is none of {', '.join(KINDS)}"
    for name in NUMBERS:
        try:
            if 0 <= float(cell[name]) < _MOST:
                continue
        except ValueError:
            return f", column {name}: {_shown(cell[name])} is no number"
        return f", column {name}: {_shown(cell[name])} is not within 0 to {_MOST:g}"
    return f": its numbers are too large together, the limit is {_MOST:g}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
