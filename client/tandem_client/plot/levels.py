"""The numbers of running and waiting sequences and of pages at every moment of a step log.

Owns the values between the lines. A line describes one lane, so running requests and pages are summed over the lanes
that serve at that moment. Needs numpy, which comes with matplotlib; knows nothing of drawing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem_client.plot.data import STEP_KINDS, StepsLog
from tandem_client.plot.lanes import LaneSpan
from tandem_client.plot.series import Band, Floats, banded

_Lines = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]
# No line: nothing is the value.
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The values between each x and the one before it, summed over all lanes that serve there.

    Sequences; percent of the lanes' pages in use, and percent in use or kept; `most_pages` is the largest number of
    pages that these lanes had at once. Running requests and pages in use end at 0: after the last result of a file no
    plan is known to be in flight.
    """

    running: Band
    waiting: Band
    pages: Band
    kept: Band
    most_pages: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moments:
    """Every line, and the moments before it at which something of its lane changes, in order of time.

    A moment has the values of its lane since the lane's moment before it: `runs` is the line of the step that ran until
    then, `holds` the line with the number of pages. `by_lane` are the moments in order of their lanes, then of time;
    `begins` (in that order) is each lane's first, `is_over` (per lane) says that it ended with its last.
    """

    at: Floats
    is_line: _Bools
    runs: _Lines
    holds: _Lines
    by_lane: _Lines
    begins: _Bools
    is_over: _Bools


def levels_by_step(log: StepsLog, step: Floats, spans: Sequence[LaneSpan]) -> Levels:
    """Per line: its own values, and those that the other lanes had when it was written."""
    moments = _moments_of(log, spans)
    return _levels(log, moments, step, moments.is_line)


def levels_by_time(log: StepsLog, at: Floats, spans: Sequence[LaneSpan]) -> Levels:
    """A line describes its own step, so the time between a lane's steps is filled in.

    Before a plan that was sent while none was in flight, nothing ran. Up to a reset, the values of the step before it
    hold if plans were in flight. Pages that are not in use any more count as cached if the file does not say otherwise.
    """
    moments = _moments_of(log, spans)
    return _levels(log, moments, moments.at - log.at_seconds[0] + at[0], slice(None))


def _levels(log: StepsLog, moments: _Moments, x: Floats, shown: _Bools | slice) -> Levels:
    # Each is made few points before the next is made: a million lines of all of them take much room.
    running = _ended(banded(x, _ran(moments, np.frombuffer(log.running))[shown]))
    waiting = banded(x, _waiting(moments, log)[shown])
    used = np.frombuffer(log.pages_used)
    total = _held(moments, np.frombuffer(log.pages_total))[shown]
    most_pages = int(total.max())
    percent = np.divide(100.0, np.maximum(total, 1, out=total), out=total)
    return Levels(
        running=running,
        waiting=waiting,
        pages=_ended(banded(x, _ran(moments, used)[shown] * percent)),
        kept=banded(x, _held(moments, used + np.frombuffer(log.pages_cached))[shown] * percent),
        most_pages=most_pages,
    )


def _ended(band: Band) -> Band:
    """With a last point, at the same x as the one before it, where nothing is left."""
    low, mean, high = (np.append(values, 0.0) for values in (band.low, band.mean, band.high))
    return Band(x=np.append(band.x, band.x[-1]), low=low, mean=mean, high=high, is_thinned=band.is_thinned)


def _moments_of(log: StepsLog, spans: Sequence[LaneSpan]) -> _Moments:
    lane, is_step = np.frombuffer(log.lane), np.frombuffer(log.kinds, np.uint8) < len(STEP_KINDS)
    before = _lines_before(lane)
    # A clock never goes back; a damaged file may.
    at = np.maximum.accumulate(np.frombuffer(log.at_seconds))
    sent = np.maximum(at - np.frombuffer(log.span_ms) / 1e3, at[0])
    pauses = np.where(before == _NONE, is_step, sent > at[before])
    # The time before the first line is not known.
    pauses[0] = False
    still_ran = ~is_step & (sent < at) & (before != _NONE) & is_step[before]
    pause = np.flatnonzero(pauses)
    mark = np.flatnonzero(~is_step[1:]) + 1
    # Put in before these lines, the pauses' ends before marks of the same time.
    where, moment = np.concatenate([np.searchsorted(at, sent[pause]), mark]), np.concatenate([sent[pause], at[mark]])
    line = np.concatenate([pause, mark])
    ran = np.concatenate([np.full(len(pause), _NONE), np.where(still_ran[mark], before[mark], _NONE)])
    order = np.lexsort((moment, where))
    where, moment, line, ran = where[order], moment[order], line[order], ran[order]
    numbers = np.arange(len(at), dtype=np.int32)
    lanes = np.insert(lane, where, lane[line])
    by_lane = np.argsort(lanes, kind="stable").astype(np.int32)
    return _Moments(
        at=np.insert(at, where, moment),
        is_line=np.insert(np.ones(len(at), np.bool_), where, np.zeros(len(where), np.bool_)),
        runs=np.insert(np.where(is_step, numbers, np.int32(_NONE)), where, ran),
        holds=np.insert(numbers, where, before[line]),
        by_lane=by_lane,
        begins=np.diff(lanes[by_lane], prepend=np.nan) != 0,
        is_over=np.array([span.is_over for span in sorted(spans, key=lambda span: span.lane)]),
    )


def _lines_before(lane: Floats) -> _Lines:
    """Per line: the line before it of the same lane, or none."""
    order = np.argsort(lane, kind="stable").astype(np.int32)
    same = np.diff(lane[order]) == 0
    before = np.full(len(lane), _NONE, np.int32)
    before[order[1:][same]] = order[:-1][same]
    return before


def _ran(moments: _Moments, values: Floats) -> Floats:
    """Per moment: the sum over the lanes of what the steps that ran until then say."""
    return _summed(moments, np.append(values, 0.0)[moments.runs], np.ones(len(moments.is_over), np.bool_))


def _held(moments: _Moments, values: Floats) -> Floats:
    """Per moment: the sum over the lanes of what each line says until the lane's next one."""
    return _summed(moments, np.append(values, 0.0)[moments.holds], moments.is_over)


def _summed(moments: _Moments, values: Floats, ends: _Bools) -> Floats:
    """`values` per moment, summed over the lanes. Nothing is left of lanes that `ends` after their last moment."""
    if len(ends) == 1:
        return values
    mine = values[moments.by_lane]
    # A value counts from right after the lane's moment before it, the first one from its own moment on.
    since = np.append(np.int32(0), moments.by_lane[:-1] + np.int32(1))
    since[moments.begins] = moments.by_lane[moments.begins]
    changes = np.diff(mine, prepend=0.0)
    changes[moments.begins] = mine[moments.begins]
    result = np.bincount(since, changes, len(values) + 1)
    last = np.append(np.flatnonzero(moments.begins)[1:], len(mine)) - 1
    np.subtract.at(result, moments.by_lane[last[ends]] + 1, mine[last[ends]])
    np.cumsum(result, out=result)
    # Sums of fractions, in a damaged file, may end just below zero.
    return np.maximum(result[:-1], 0.0, out=result[:-1])


def _waiting(moments: _Moments, log: StepsLog) -> Floats:
    """Per moment. A line counts for all lanes. Between steps: the smaller of the numbers around, or a mark's."""
    waiting = np.frombuffer(log.waiting)
    is_step = np.frombuffer(log.kinds, np.uint8) < len(STEP_KINDS)
    following = np.cumsum(moments.is_line, dtype=np.int32) - moments.is_line
    before = np.maximum(following - 1, 0)
    is_busy = _ran(moments, np.ones(len(waiting))) > 0
    is_told = moments.is_line | is_busy & is_step[following]
    between = np.where(is_busy | ~is_step[before], waiting[before], np.minimum(waiting[before], waiting[following]))
    return np.where(is_told, waiting[following], between)
