"""Reads the file that the scheduler's --steps writes; reduces its columns to what is drawn, and sums them for a table.

The file has a CSV line per step, lane reset and worker that joined. Owns the check that a file is a step log, how many
points are merged into one, the values between lines, and the sums per kind of step and per lane. The service's
`recording/steps_file.py` documents the columns. Needs numpy; does not draw.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem_contract.plural import counted

# Kinds of steps, in the order of the table and the legend. A `reset` or `joined` line is not a step.
STEP_KINDS = ("prefill", "decode", "mixed")
RESET, JOINED = "reset", "joined"
# The cause of a reset after which the worker is gone.
WORKER_LOST = "worker lost"

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.str_]
Bools = npt.NDArray[np.bool_]

# About one per pixel of the wide panels. Up to this number, each point is drawn as it is.
MOST_POINTS = 1200
_MOST_RATES = 150
_STEPS_PER_RATE = 4
# A shorter time between a result and the next plan is the scheduler's own, or comes of the file's rounding.
_LEAST_GAP_SECONDS = 1e-3
# The lanes with the most steps that are listed if there are more.
_MOST_LANES = 8
# The numbers of `StepSums` in the table, and how each is written.
_COLUMNS = {"steps": ",", "seconds": ".2f", "share": ".0%", "median_ms": ".2f", "tokens": ",", "output_tokens": ","}


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """The least, mean and greatest value at each `x`; all three are equal unless points were merged."""

    x: Floats
    low: Floats
    mean: Floats
    high: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The values that hold between each x and the x before it. Pages are percent of the pages of all workers.

    `running` and `used` end at 0, because no plan is known to be in flight after the last line.
    """

    running: Band
    waiting: Band
    used: Band
    used_or_cached: Band


def banded(x: Floats, values: Floats) -> Band:
    """Merges the points of each of MOST_POINTS equal bins; returns at most that many points. `x` ascends."""
    if len(x) <= MOST_POINTS:
        return Band(x=x, low=values, mean=values, high=values)
    width = (x[-1] - x[0]) / MOST_POINTS or 1.0
    bins = np.minimum((x - x[0]) / width, MOST_POINTS - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    counts = np.diff(starts, append=len(x))
    return Band(
        x=np.add.reduceat(x, starts) / counts,
        low=np.minimum.reduceat(values, starts),
        mean=np.add.reduceat(values, starts) / counts,
        high=np.maximum.reduceat(values, starts),
    )


def levels(log: StepsLog, *, by_time: bool) -> Levels:
    """The service's levels over step numbers or over time."""
    percent = 100 / np.maximum(log.all_pages_total, 1)
    running, used = log.all_running, log.all_pages_used * percent
    waiting, used_or_cached = log.waiting, (log.all_pages_used + log.all_pages_cached) * percent
    x = log.step
    if by_time:
        at, x = log.seconds, log.seconds
        sent = _earliest_after(at - log.span_ms / 1e3)[1:]
        # A line describes the time of its step. It does not describe the time before it if no plan was in flight, nor,
        # as a reset or join, the time since the line before.
        is_idle = sent > at[:-1] + _LEAST_GAP_SECONDS
        gaps = np.flatnonzero(is_idle | ~log.is_step[1:])
        x = np.insert(x, gaps + 1, np.where(is_idle, sent, at[1:])[gaps])

        def filled(values: Floats, idle: Floats | float) -> Floats:
            """Values with those of the gaps: `idle` if no plan was in flight, else the value of the line before."""
            return np.insert(values, gaps + 1, np.where(is_idle, idle, values[:-1])[gaps])

        running, used = filled(running, 0), filled(used, 0)
        waiting = filled(waiting, np.minimum(waiting[:-1], waiting[1:]))
        used_or_cached = filled(used_or_cached, used_or_cached[:-1])
    return Levels(
        running=_ended(banded(x, running)),
        waiting=banded(x, waiting),
        used=_ended(banded(x, used)),
        used_or_cached=banded(x, used_or_cached),
    )


def _earliest_after(begins: Floats) -> Floats:
    """Per line: the earliest begin of this line and all later ones."""
    return np.minimum.accumulate(begins[::-1])[::-1]


def _ended(band: Band) -> Band:
    return Band(
        x=np.append(band.x, band.x[-1]),
        **{name: np.append(getattr(band, name), 0.0) for name in ("low", "mean", "high")},
    )


def stepping_seconds(log: StepsLog) -> float:
    """The time in which at least one worker ran a step."""
    at = log.at_seconds[log.is_step]
    begins = at - log.ms[log.is_step] / 1e3
    # Lines are in order of their ends, so what begins after a line's step ends after it too.
    covered_from = np.append(_earliest_after(begins)[1:], np.inf)
    return float(np.maximum(np.minimum(at, covered_from) - begins, 0).sum())


def without_worker(log: StepsLog) -> list[tuple[float, float]]:
    """The intervals, in seconds, without a worker."""
    at = log.seconds
    return [(float(at[i]), float(at[i + 1])) for i in np.flatnonzero(log.workers[:-1] == 0)]


def reach(x: Floats, *, by_time: bool) -> tuple[float, float]:
    """The left and right end of the picture. Step n lies between n - 1 and n."""
    first = 0.0 if by_time else max(0.0, float(x[0]) - 1)
    return first, max(float(x[-1]), first + 1e-6)


def output_rates(log: StepsLog, x: Floats, *, by_time: bool) -> tuple[Floats, Floats]:
    """The edges of equal bins of `x`, and the output tokens per second in each bin."""
    num_bins = int(np.clip(log.is_step.sum() // _STEPS_PER_RATE, 1, _MOST_RATES))
    edges = np.linspace(*reach(x, by_time=by_time), num_bins + 1)
    tokens = np.histogram(x, edges, weights=log.output_tokens)[0]
    seconds = np.diff(np.interp(edges, np.append(edges[0], x), np.append(0.0, log.seconds)))
    return edges, np.divide(tokens, seconds, out=np.zeros(num_bins), where=seconds > 0)


def kind_shares(log: StepsLog, x: Floats, *, by_time: bool) -> tuple[Floats, Floats]:
    """The edges of equal bins of `x`, and float64[kinds, bins]: the share of each kind of step in the bin, 0 to 1.

    The share is that of a bin's steps, or, over time, that of its seconds; seconds without a step belong to no kind.
    """
    first, last = reach(x, by_time=by_time)
    num_bins = MOST_POINTS if by_time else int(min(last - first, MOST_POINTS))
    edges = np.linspace(first, last, num_bins + 1)
    amounts = np.zeros((len(STEP_KINDS), num_bins))
    for i, kind in enumerate(STEP_KINDS):
        mine = log.kind == kind
        if by_time:
            passed = _seconds_since(x[mine] - log.ms[mine] / 1e3, edges) - _seconds_since(x[mine], edges)
            amounts[i] = np.diff(passed) / np.diff(edges)
        else:
            amounts[i] = np.histogram(x[mine] - 0.5, edges)[0]
    # Steps of several workers overlap.
    return edges, amounts / np.maximum(amounts.sum(axis=0), 1)


def _seconds_since(moments: Floats, edges: Floats) -> Floats:
    """Per edge: the sum of (edge - moment) over the moments before it. `moments` ascend."""
    moments = np.sort(moments)
    passed = np.searchsorted(moments, edges)
    return passed * edges - np.append(0.0, np.cumsum(moments))[passed]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """The steps of one kind or of one lane; `seconds` are the worker's own, `share` is of all steps' seconds."""

    name: str
    steps: int
    seconds: float
    share: float
    median_ms: float
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`kinds` has each kind that occurs. `lanes` has the lanes with the most steps if several workers served at once.

    The seconds of `all` add up the steps of all workers, so those that overlap count twice. `stepping_seconds` is the
    time in which at least one worker ran a step; `wall_seconds` is the time from the first line to the last.
    `num_workers` is the largest number of workers at once. `resets` counts the lane resets other than lost workers.
    """

    all: StepSums
    kinds: tuple[StepSums, ...]
    lanes: tuple[StepSums, ...]
    num_workers: int
    stepping_seconds: float
    wall_seconds: float
    seconds_without_worker: float
    workers_lost: int
    resets: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second while a worker stepped, so idle time does not count; 0 for steps of no length."""
        return self.all.output_tokens / self.stepping_seconds if self.stepping_seconds else 0.0

    @property
    def losses(self) -> str:
        """Text such as "2 workers lost, 78 s without a worker, 1 lane reset"; empty if nothing was lost or reset."""
        parts = (
            (self.workers_lost, f"{counted(self.workers_lost, 'worker')} lost"),
            (self.seconds_without_worker, f"{self.seconds_without_worker:,.1f} s without a worker"),
            (self.resets, counted(self.resets, "lane reset")),
        )
        return ", ".join(words for number, words in parts if number)


def summarize(log: StepsLog) -> Summary:
    """The sums of a log with at least one step."""
    num_workers = int(log.workers.max())
    lanes, steps = np.unique(log.lane[log.is_step], return_counts=True)
    busiest = np.sort(lanes[np.argsort(-steps, kind="stable")][:_MOST_LANES])
    workers_lost = int((log.cause == WORKER_LOST).sum())
    return Summary(
        all=_sums("all", log, log.is_step),
        kinds=tuple(_sums(kind, log, log.kind == kind) for kind in STEP_KINDS if kind in log.kind),
        lanes=tuple(_sums(f"lane {lane:g}", log, log.is_step & (log.lane == lane)) for lane in busiest)
        if num_workers > 1
        else (),
        num_workers=num_workers,
        stepping_seconds=stepping_seconds(log),
        wall_seconds=float(log.seconds[-1]),
        seconds_without_worker=sum(end - begin for begin, end in without_worker(log)),
        workers_lost=workers_lost,
        resets=int((log.kind == RESET).sum()) - workers_lost,
    )


def _sums(name: str, log: StepsLog, mine: Bools) -> StepSums:
    ms = log.ms[mine]
    return StepSums(
        name=name,
        steps=len(ms),
        seconds=float(ms.sum()) / 1e3,
        share=float(ms.sum()) / max(float(log.ms[log.is_step].sum()), 1e-9),
        median_ms=float(np.median(ms)),
        tokens=int(log.tokens[mine].sum()),
        output_tokens=int(log.output_tokens[mine].sum()),
    )


def table(summary: Summary) -> Iterator[str]:
    rows = [("kind", *(name.replace("_", " ") for name in _COLUMNS))]
    for sums in (*summary.kinds, *summary.lanes, summary.all):
        rows.append((sums.name, *(format(getattr(sums, name), form) for name, form in _COLUMNS.items())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells)
    losses = f"; {summary.losses}" if summary.losses else ""
    yield (
        f"{summary.stepping_seconds:,.2f} of {summary.wall_seconds:,.2f} s spent stepping, "
        f"{summary.tokens_per_second:,.1f} output tokens/s while stepping{losses}"
    )
