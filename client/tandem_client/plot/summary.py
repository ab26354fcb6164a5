"""Sums of a file of steps: steps, seconds and tokens per kind of step and per lane. Knows nothing of the picture."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from tandem_client.plot.data import DECODE, KINDS, RESET, STEP_KINDS, WORKER_LOST, StepsLog
from tandem_client.plot.lanes import LaneSpan, lanes_of, most_at_once

# Lanes that the table lists, those with most steps.
_MOST_LANES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """All steps of one kind; `seconds` are the worker's own, `share` is of all steps' seconds."""

    kind: str
    steps: int
    seconds: float
    share: float
    median_ms: float
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """A worker's time with the service; a `decode_median_ms` of 0 stands for no decode step."""

    lane: float
    served_seconds: float
    busy_seconds: float
    steps: int
    seconds: float
    decode_median_ms: float
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`wall_seconds` from the first line to the last; kinds that occur, in order.

    `step_seconds` adds up the steps of all workers, as each measured them: those that overlap count twice.
    `stepping_seconds` is the time in which at least one worker ran a step. `worker_seconds` is the time that the
    workers were present (`wall_seconds` if only one served at a time), `busy_seconds` the part of it spent in steps.
    `num_workers` is the largest number that served at once; if it is above one, `lanes` has each that ran a step.
    `resets` counts the lane resets other than lost workers.
    """

    kinds: tuple[KindSummary, ...]
    lanes: tuple[LaneSummary, ...]
    num_workers: int
    worker_seconds: float
    busy_seconds: float
    steps: int
    step_seconds: float
    stepping_seconds: float
    wall_seconds: float
    tokens: int
    output_tokens: int
    workers_lost: int
    resets: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second while a worker stepped, so idle time does not count; 0 for steps of no length."""
        return self.output_tokens / self.stepping_seconds if self.stepping_seconds else 0.0

    @property
    def losses(self) -> str:
        """ "2 workers lost, 1 lane reset"; empty if nothing was lost or reset."""
        lost = f"{counted(self.workers_lost, 'worker')} lost" if self.workers_lost else ""
        return ", ".join(filter(None, (lost, counted(self.resets, "lane reset") if self.resets else "")))


def summarize(log: StepsLog) -> Summary:
    """The sums of a log with at least one step."""
    ms: list[list[float]] = [[] for _ in STEP_KINDS]
    tokens, outputs = [0.0] * len(STEP_KINDS), [0.0] * len(STEP_KINDS)
    for i, kind in enumerate(log.kinds):
        if kind < len(STEP_KINDS):
            ms[kind].append(log.ms[i])
            tokens[kind] += log.tokens[i]
            outputs[kind] += log.output_tokens[i]
    spans = lanes_of(log)
    stepping, busy = _stepping_seconds(log)
    num_workers = most_at_once(spans)
    served = sum(span.end - span.begin for span in spans)
    step_ms = sum(map(sum, ms))
    # A line is written when its step is done, so the first step began before the first line.
    wall_seconds = log.at_seconds[-1] - log.at_seconds[0]
    if log.kinds[0] < len(STEP_KINDS):
        wall_seconds += log.ms[0] / 1e3
    wall_seconds = max(0.0, wall_seconds)
    workers_lost = list(log.causes.values()).count(WORKER_LOST)
    return Summary(
        kinds=tuple(
            KindSummary(
                kind=name,
                steps=len(ms[kind]),
                seconds=sum(ms[kind]) / 1e3,
                share=sum(ms[kind]) / step_ms if step_ms else 0.0,
                median_ms=median(ms[kind]),
                tokens=int(tokens[kind]),
                output_tokens=int(outputs[kind]),
            )
            for kind, name in enumerate(STEP_KINDS)
            if ms[kind]
        ),
        lanes=_lanes(log, spans, busy) if num_workers > 1 else (),
        num_workers=num_workers,
        worker_seconds=max(wall_seconds, served) if num_workers > 1 else wall_seconds,
        busy_seconds=sum(busy.values()),
        steps=sum(map(len, ms)),
        step_seconds=step_ms / 1e3,
        stepping_seconds=stepping,
        wall_seconds=wall_seconds,
        tokens=int(sum(tokens)),
        output_tokens=int(sum(outputs)),
        workers_lost=workers_lost,
        resets=log.kinds.count(KINDS.index(RESET)) - workers_lost,
    )


def _stepping_seconds(log: StepsLog) -> tuple[float, dict[float, float]]:
    """Seconds in which any lane ran a step, and per lane. A step lasts from `at` minus its milliseconds to `at`."""
    total, left = 0.0, inf
    of_lane: dict[float, float] = defaultdict(float)
    left_of_lane: dict[float, float] = defaultdict(lambda: inf)
    # Lines are in order of their ends, so going backwards everything right of `left` is already counted.
    for at, ms, kind, lane in zip(*map(reversed, (log.at_seconds, log.ms, log.kinds, log.lane)), strict=True):
        begin = at - ms / 1e3
        if kind >= len(STEP_KINDS):
            continue
        if begin < left:
            total += min(at, left) - begin
            left = begin
        if begin < left_of_lane[lane]:
            of_lane[lane] += min(at, left_of_lane[lane]) - begin
            left_of_lane[lane] = begin
    return total, of_lane


def _lanes(log: StepsLog, spans: Sequence[LaneSpan], busy: Mapping[float, float]) -> tuple[LaneSummary, ...]:
    steps, ms, outputs = Counter[float](), defaultdict[float, float](float), defaultdict[float, float](float)
    decode_ms: dict[float, array[float]] = defaultdict(lambda: array("d"))
    decode = STEP_KINDS.index(DECODE)
    for lane, kind, took, output in zip(log.lane, log.kinds, log.ms, log.output_tokens, strict=True):
        if kind < len(STEP_KINDS):
            steps[lane] += 1
            ms[lane] += took
            outputs[lane] += output
            if kind == decode:
                decode_ms[lane].append(took)
    return tuple(
        LaneSummary(
            lane=span.lane,
            served_seconds=span.end - span.begin,
            busy_seconds=busy[span.lane],
            steps=steps[span.lane],
            seconds=ms[span.lane] / 1e3,
            decode_median_ms=median(decode_ms[span.lane] or [0.0]),
            output_tokens=int(outputs[span.lane]),
        )
        for span in spans
        if steps[span.lane]
    )


def table(summary: Summary) -> Iterator[str]:
    """The summary as lines for people."""
    rows = [("kind", "steps", "seconds", "share", "median ms", "tokens", "output tokens")]
    rows += [
        (
            kind.kind,
            f"{kind.steps:,}",
            f"{kind.seconds:.2f}",
            f"{kind.share:.0%}",
            f"{kind.median_ms:.2f}",
            f"{kind.tokens:,}",
            f"{kind.output_tokens:,}",
        )
        for kind in summary.kinds
    ]
    all_tokens = (f"{summary.tokens:,}", f"{summary.output_tokens:,}")
    rows.append(("all", f"{summary.steps:,}", f"{summary.step_seconds:.2f}", "100%", "", *all_tokens))
    yield from _aligned(rows)
    if summary.lanes:
        yield from _lane_lines(summary.lanes)
    losses = f"; {summary.losses}" if summary.losses else ""
    yield (
        f"{summary.stepping_seconds:,.2f} of {summary.wall_seconds:,.2f} s spent stepping, "
        f"{summary.tokens_per_second:,.1f} output tokens/s while stepping{losses}"
    )


def _lane_lines(lanes: Sequence[LaneSummary]) -> Iterator[str]:
    busiest = sorted(lanes, key=lambda lane: -lane.steps)[:_MOST_LANES]
    rows = [("lane", "served s", "steps", "seconds", "busy", "decode ms", "output tokens")]
    rows += [
        (
            f"{lane.lane:g}",
            f"{lane.served_seconds:.2f}",
            f"{lane.steps:,}",
            f"{lane.seconds:.2f}",
            f"{min(1.0, lane.busy_seconds / lane.served_seconds) if lane.served_seconds else 0:.0%}",
            f"{lane.decode_median_ms:.2f}",
            f"{lane.output_tokens:,}",
        )
        for lane in sorted(busiest, key=lambda lane: lane.lane)
    ]
    yield from _aligned(rows)
    if len(lanes) > len(busiest):
        yield f"and {counted(len(lanes) - len(busiest), 'lane')} with fewer steps"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells)


def counted(number: int, thing: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
