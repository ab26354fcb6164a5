"""The harness of every measurement: its flags, rounds in turns, spreads, bars, and one way to print them.

A measurement prints lines, each a mapping from names to numbers, texts or such mappings, and bars; `--json` prints one
object per line, first the machine. The exit code is 1 if a bar was missed. Does not know what is measured.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np

from tests.measure.machine import description

T = TypeVar("T")


def percentiles(values: Sequence[float], which: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Returns interpolated percentiles as `{"p50": …}`; empty without values."""
    if not len(values):
        return {}
    return {f"p{p}": float(np.percentile(values, p)) for p in which}


def in_ms(seconds: Sequence[float], which: Sequence[int] = (50, 99)) -> dict[str, float]:
    """Returns percentiles of seconds, in milliseconds."""
    return percentiles([1e3 * one for one in seconds], which)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median of repeated measurements, and what they range over."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def in_turns(rounds: int, sides: Mapping[str, Callable[[], T]], *, warm: int = 0) -> dict[str, list[T]]:
    """Calls the sides in turns, so that all meet the same machine; every second round in reverse order.

    Returns the results of each side by round, without those of the first `warm` rounds.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(warm + rounds):
        for name in sides if number % 2 else reversed(sides):
            result = sides[name]()
            if number >= warm:
                found[name].append(result)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit of one figure, inclusive."""

    name: str
    value: float
    limit: float
    is_floor: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_floor else self.value <= self.limit

    def line(self) -> dict[str, Any]:
        sign = "at least" if self.is_floor else "at most"
        return {"bar": f"{self.name}: {sign} {self.limit:g}", "value": self.value, "met": self.is_met}


class Measurement:
    """The command of one measurement. `flag` adds a flag as argparse's `add_argument` does."""

    def __init__(self, module: str) -> None:
        self.parser = argparse.ArgumentParser(prog=f"python -m tests.measure.{module}", allow_abbrev=False)
        self.flag = self.parser.add_argument
        self.flag("--json", action="store_true", help="print one JSON object per line")
        self.is_json = False
        self._missed = False
        # Of the columns of the table that is printed, by their names.
        self._widths: dict[str, int] = {}

    def begin(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses the flags and prints the machine. Exits with 2 at a wrong flag."""
        args = self.parser.parse_args(argv)
        self.is_json = args.json
        self.line({"machine": description()}, text=words(description()))
        return args

    def line(self, figures: Mapping[str, Any], *, text: str | None = None) -> None:
        """Prints figures. `text`: their form for people, in place of the usual one; empty: they get none."""
        shown = json.dumps(figures) if self.is_json else "\n".join(rows(figures)) if text is None else text
        if shown:
            print(shown, flush=True)

    def row(self, figures: Mapping[str, Any]) -> None:
        """Prints figures as a row of a table, whose columns are named where they change."""
        cells, before = {name: words(value) for name, value in figures.items()}, self._widths
        is_new = cells.keys() != before.keys()
        width = {name: max(8, len(name), len(cell), 0 if is_new else before[name]) for name, cell in cells.items()}
        if is_new:
            self.note("\n" + "  ".join(f"{name.replace('_', ' '):>{width[name]}}" for name in cells))
        self.line(figures, text="  ".join(f"{cell:>{width[name]}}" for name, cell in cells.items()))
        self._widths = width

    def note(self, text: str) -> None:
        """Prints a sentence for people."""
        if not self.is_json:
            print(text, flush=True)

    def bar(self, *bars: Bar) -> None:
        """Prints and counts bars."""
        for bar in bars:
            self._missed |= not bar.is_met
            line = bar.line()
            self.line(line, text=f"{line['bar']}; {words(bar.value)}, {'met' if bar.is_met else 'MISSED'}")

    @property
    def exit_code(self) -> int:
        return int(self._missed)


def words(value: object) -> str:
    """Returns a figure, or a mapping of figures, on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {words(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"
    if isinstance(value, list):
        return ", ".join(map(words, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def rows(figures: Mapping[str, Any], indent: str = "  ") -> Iterator[str]:
    """Yields a title of the texts among the figures, then a row for each other figure; mappings of mappings nest."""
    titles = [each for each in figures.values() if isinstance(each, str)]
    if titles:
        yield "\n" + ", ".join(titles)
    for name, value in figures.items():
        title = f"{indent}{name.replace('_', ' ')}:"
        if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
            yield title
            yield from rows(value, indent + "  ")
        elif not isinstance(value, str):
            yield f"{title:<44}{words(value)}"
