"""When each lane served. A lane is one worker's time with the service; a worker that joins again is another lane.

Owns the begin and end of lanes. Knows nothing of their steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_client.plot.data import KINDS, RESET, STEP_KINDS, StepsLog


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan:
    """`begin` and `end` in the file's seconds; `is_over`: it served no more after that."""

    lane: float
    begin: float
    end: float
    is_over: bool


def lanes_of(log: StepsLog) -> tuple[LaneSpan, ...]:
    """In order of their first lines. A reset that is a lane's last line ended the lane, whichever its cause.

    A lane that was reset and has not run a step since may still serve; the file does not say.
    """
    last = dict(zip(log.lane, range(len(log.lane)), strict=True))
    first = dict(zip(reversed(log.lane), range(len(log.lane) - 1, -1, -1), strict=True))
    reset = KINDS.index(RESET)
    spans: list[LaneSpan] = []
    for lane, i in sorted(first.items(), key=lambda item: item[1]):
        j = last[lane]
        # A lane that joined began at that line. A step began earlier, but not before the file's first line.
        ran = log.kinds[i] < len(STEP_KINDS)
        begin = log.at_seconds[i] - (log.ms[i] if i == 0 else log.span_ms[i]) / 1e3 * ran
        is_over = log.kinds[j] == reset
        end = log.at_seconds[j] if is_over else log.at_seconds[-1]
        spans.append(LaneSpan(lane=lane, begin=begin, end=max(begin, end), is_over=is_over))
    return tuple(spans)


def most_at_once(spans: Sequence[LaneSpan]) -> int:
    """The largest number of lanes that served at once. A lane that begins when another ends replaces it."""
    changes = sorted([(span.begin, 1) for span in spans] + [(span.end, -1) for span in spans if span.is_over])
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def without_worker(spans: Sequence[LaneSpan]) -> list[tuple[float, float]]:
    """Intervals without a worker, between the first lane and the last."""
    found: list[tuple[float, float]] = []
    first, *others = sorted(spans, key=lambda span: span.begin)
    end = first.end
    for span in others:
        if span.begin > end:
            found.append((end, span.begin))
        end = max(end, span.end)
    return found
