"""Columns of a step log reduced to what can be drawn: bins with minimum, mean and maximum, shares of kinds, marks.

Owns how many points are merged. Needs numpy, which comes with matplotlib; knows nothing of drawing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem_client.plot.data import JOINED, KINDS, RESET, STEP_KINDS, StepsLog
from tandem_client.plot.lanes import LaneSpan, most_at_once, without_worker

Floats = npt.NDArray[np.float64]

# About one per pixel of the wide panels; up to this number each point is drawn as it is.
MOST_POINTS = 1200
# If there are more marks, none has words, which would cover each other and the lines.
MOST_WORDS = 6
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
    """Lane resets and workers that joined others: places and words; and the intervals, in seconds, without a worker.

    `words` is empty if there would be too many.
    """

    x: Floats
    words: list[str]
    without_worker: list[tuple[float, float]]


def preemptions_at(log: StepsLog, x: Floats) -> Floats:
    """Steps at which requests were preempted, at most MOST_POINTS places."""
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


def shares_by_time(log: StepsLog, at: Floats, spans: Sequence[LaneSpan]) -> Shares:
    """Of a bin's seconds, those of all lanes that serve in it. What is in no step stays free.

    A step lies between `at` minus its milliseconds and `at`.
    """
    kinds, seconds = np.frombuffer(log.kinds, np.uint8), np.frombuffer(log.ms) / 1e3
    edges = np.arange(MOST_POINTS + 1, dtype=np.float64) * (max(float(at[-1]), 1e-9) / MOST_POINTS)
    of = np.zeros((len(STEP_KINDS), MOST_POINTS))
    for i in range(len(STEP_KINDS)):
        mine = kinds == i
        # Seconds spent in steps before each edge: a ramp per step, summed.
        of[i] = np.diff(_spent(at[mine] - seconds[mine], at[mine], edges)) / np.diff(edges)
    served = np.array([(span.begin, span.end) for span in spans]) + (at[0] - log.at_seconds[0])
    lanes = np.diff(_spent(served[:, 0], served[:, 1], edges)) / np.diff(edges)
    return Shares(edges=edges, of=of / np.maximum(np.maximum(lanes, of.sum(axis=0)), 1.0))


def _spent(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Per edge: seconds of all intervals before it."""
    return _since(np.sort(begins), edges) - _since(np.sort(ends), edges)


def _since(moments: Floats, edges: Floats) -> Floats:
    """Per edge: the sum of (edge - moment) over the moments before it. `moments` ascend."""
    passed = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(moments)])
    return passed * edges - sums[passed]


def marks_of(log: StepsLog, x: Floats, at: Floats, spans: Sequence[LaneSpan]) -> Marks:
    """Every lane reset and how it went on: when another worker joined, or when the lane's next step was done.

    If several lanes served at once, the marks name them; each lane that joined after the first step has its own mark.
    """
    kinds, lanes = np.frombuffer(log.kinds, np.uint8), np.frombuffer(log.lane)
    is_step = kinds < len(STEP_KINDS)
    has_several = most_at_once(spans) > 1
    is_marked = kinds == KINDS.index(RESET)
    if has_several:
        is_marked |= (kinds == KINDS.index(JOINED)) & (np.cumsum(is_step) > 0)
    marked = np.flatnonzero(is_marked)
    to_x = float(at[0]) - log.at_seconds[0]
    nobody = [(begin + to_x, end + to_x) for begin, end in without_worker(spans)]
    words: list[str] = []
    for i in marked[: MOST_WORDS + 1].tolist():
        name = f"lane {log.lane[i]:g}: " if has_several else ""
        if kinds[i] == KINDS.index(JOINED):
            words.append(f"{name}joined")
            continue
        name += log.causes[i][:_MOST_CAUSE] or RESET
        went_on = is_step[i:] & (lanes[i:] == lanes[i])
        what = "next step done"
        if not has_several and not went_on.any():
            went_on, what = kinds[i:] == KINDS.index(JOINED), "another joined"
        seconds = float(at[i + int(went_on.argmax())] - at[i])
        words.append(f"{name}\n{what} {_seconds(seconds)} later" if went_on.any() else name)
    return Marks(x=x[marked], words=words if len(words) <= MOST_WORDS else [], without_worker=nobody)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:,.1f} s"
