"""Columns of a file of steps made few enough to draw: bins with their least, mean and most, shares of kinds, marks.

Owns how much is put together. Needs numpy, which comes with matplotlib; knows nothing of drawing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from client.plot_data import KINDS, RESET, STEP_KINDS, StepsLog

Floats = npt.NDArray[np.float64]

# About one per pixel of the wide panels: up to so many points, each is drawn as it is.
MOST_POINTS = 1200
# Characters of a reset's cause; the service's own are shorter.
_MOST_CAUSE = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """`low`, `mean` and `high` at each `x`; equal unless points were put together."""

    x: Floats
    low: Floats
    mean: Floats
    high: Floats
    is_thinned: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """float64[kinds, bins]: a bin's share of each step kind, 0 to 1 together; `edges` has one more than bins."""

    edges: Floats
    of: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks:
    """Lane resets: where, in words, and (in seconds) from when to when there was no worker."""

    x: Floats
    words: list[str]
    without_worker: list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """What holds up to each `x` from the one before it: sequences; percent of the pages in use, and those kept too."""

    x: Floats
    running: Floats
    waiting: Floats
    pages: Floats
    kept: Floats


def levels_by_step(log: StepsLog, step: Floats) -> Levels:
    """Per line, as it stands there."""
    used, cached = np.frombuffer(log.pages_used), np.frombuffer(log.pages_cached)
    total = np.maximum(np.frombuffer(log.pages_total), 1)
    return Levels(
        x=step,
        running=np.frombuffer(log.running),
        waiting=np.frombuffer(log.waiting),
        pages=100 * used / total,
        kept=100 * (used + cached) / total,
    )


def levels_by_time(log: StepsLog, at: Floats) -> Levels:
    """A line tells of its own step alone, so what lies between steps is put in.

    Before a plan that was sent when none was in flight nothing ran: nobody was there, or whoever a mark says waited.
    Up to a reset, what the step before it says holds. Pages that are in use no more are kept, as far as is told.
    """
    levels = levels_by_step(log, at)
    is_step = np.frombuffer(log.kinds, np.uint8) < len(STEP_KINDS)
    sent = at - np.frombuffer(log.span_ms) / 1e3
    gap = np.flatnonzero(is_step[1:] & (sent[1:] > at[:-1])) + 1
    reset = np.flatnonzero(~is_step[1:] & is_step[:-1]) + 1
    where = np.concatenate([gap, reset])
    order = np.argsort(where)

    def filled(values: Floats, *, idle: float | Floats = 0.0) -> Floats:
        before = np.concatenate([np.where(is_step[gap - 1], idle, values[gap - 1]), values[reset - 1]])
        return np.insert(values, where[order], before[order])

    return Levels(
        x=np.insert(at, where[order], np.concatenate([sent[gap], at[reset]])[order]),
        running=filled(levels.running),
        waiting=filled(levels.waiting),
        pages=filled(levels.pages),
        kept=filled(levels.kept, idle=levels.kept[gap - 1]),
    )


def preemptions_at(log: StepsLog, x: Floats) -> Floats:
    """Where somebody gave way, at most MOST_POINTS places."""
    places = x[1:][np.diff(np.frombuffer(log.preemptions)) > 0]
    return banded(places, places).x if len(places) else places


def banded(x: Floats, values: Floats) -> Band:
    """At most MOST_POINTS points; bins are equally wide, those without a point left out."""
    if len(x) <= MOST_POINTS:
        return Band(x=x, low=values, mean=values, high=values, is_thinned=False)
    idx = _bins(x)
    starts = np.flatnonzero(np.diff(idx, prepend=-1))
    counts = np.diff(starts, append=len(x))
    return Band(
        x=np.add.reduceat(x, starts) / counts,
        low=np.minimum.reduceat(values, starts),
        mean=np.add.reduceat(values, starts) / counts,
        high=np.maximum.reduceat(values, starts),
        is_thinned=True,
    )


def _bins(x: Floats) -> npt.NDArray[np.int64]:
    """Each point's bin. `x` ascends; a clock that stood still gives one bin."""
    width = (x[-1] - x[0]) / MOST_POINTS or 1.0
    # What a damaged file has out of order goes to the bin of what came before.
    ascending = np.maximum.accumulate(x)
    return np.minimum((ascending - x[0]) / width, MOST_POINTS - 1).astype(np.int64)


def shares_by_step(log: StepsLog, step: Floats) -> Shares:
    """Among a bin's steps. Step n lies between n - 1 and n."""
    kinds = np.frombuffer(log.kinds, np.uint8)
    is_step = kinds < len(STEP_KINDS)
    step, kinds = step[is_step], kinds[is_step]
    first, last = step[0] - 1, max(step[-1], step[0])
    num_bins = int(min(last - first, MOST_POINTS))
    edges = first + (last - first) / num_bins * np.arange(num_bins + 1)
    counts = np.stack([np.histogram(step[kinds == i] - 0.5, edges)[0] for i in range(len(STEP_KINDS))])
    return Shares(edges=edges, of=counts / np.maximum(counts.sum(axis=0), 1))


def shares_by_time(log: StepsLog, at: Floats) -> Shares:
    """Of a bin's seconds. A step lies between `at` minus its milliseconds and `at`; what is in no step stays free."""
    kinds, seconds = np.frombuffer(log.kinds, np.uint8), np.frombuffer(log.ms) / 1e3
    edges = np.arange(MOST_POINTS + 1, dtype=np.float64) * (max(float(at[-1]), 1e-9) / MOST_POINTS)
    of = np.zeros((len(STEP_KINDS), MOST_POINTS))
    for i in range(len(STEP_KINDS)):
        mine = kinds == i
        # Seconds spent in steps before each edge: a ramp per step, summed.
        of[i] = np.diff(_spent(at[mine] - seconds[mine], at[mine], edges)) / np.diff(edges)
    return Shares(edges=edges, of=of / np.maximum(of.sum(axis=0), 1.0))


def _spent(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Per edge: seconds of all intervals before it."""
    return _since(np.sort(begins), edges) - _since(np.sort(ends), edges)


def _since(moments: Floats, edges: Floats) -> Floats:
    """Per edge: the sum of (edge - moment) over the moments before it. `moments` ascend."""
    passed = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(moments)])
    return passed * edges - sums[passed]


def marks_of(log: StepsLog, x: Floats, at: Floats) -> Marks:
    """Every lane reset. Its pause lasts until the next step's result."""
    kinds = np.frombuffer(log.kinds, np.uint8)
    resets = np.flatnonzero(kinds == KINDS.index(RESET))
    steps = np.flatnonzero(kinds < len(STEP_KINDS))
    words: list[str] = []
    without_worker: list[tuple[float, float]] = []
    for i in resets.tolist():
        cause = log.causes[i][:_MOST_CAUSE] or RESET
        following = int(np.searchsorted(steps, i))
        pause = f"\n{at[steps[following]] - at[i]:,.2f} s to the next step" if following < len(steps) else ""
        words.append(f"{cause}{pause}")
        if i + 1 < len(kinds) and kinds[i + 1] > kinds[i]:
            without_worker.append((float(at[i]), float(at[i + 1])))
    return Marks(x=x[resets], words=words, without_worker=without_worker)
