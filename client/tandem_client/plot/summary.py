"""Sums of a step log: steps, seconds and tokens per kind of step and per lane, and the table of them. Needs numpy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tandem_client.plot.data import RESET, STEP_KINDS, WORKER_LOST, Bools, StepsLog, stepping_seconds, without_worker
from tandem_contract.plural import counted

# Of more lanes, only those with the most steps are listed.
_MOST_LANES = 8


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
        parts: list[str] = []
        if self.workers_lost:
            parts.append(f"{counted(self.workers_lost, 'worker')} lost")
        if self.seconds_without_worker:
            parts.append(f"{self.seconds_without_worker:,.1f} s without a worker")
        if self.resets:
            parts.append(counted(self.resets, "lane reset"))
        return ", ".join(parts)


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
    """The summary as lines of text."""
    rows = [("kind", "steps", "seconds", "share", "median ms", "tokens", "output tokens")]
    rows += [
        (
            sums.name,
            f"{sums.steps:,}",
            f"{sums.seconds:.2f}",
            f"{sums.share:.0%}",
            f"{sums.median_ms:.2f}",
            f"{sums.tokens:,}",
            f"{sums.output_tokens:,}",
        )
        for sums in (*summary.kinds, *summary.lanes, summary.all)
    ]
    yield from _aligned(rows)
    losses = f"; {summary.losses}" if summary.losses else ""
    yield (
        f"{summary.stepping_seconds:,.2f} of {summary.wall_seconds:,.2f} s spent stepping, "
        f"{summary.tokens_per_second:,.1f} output tokens/s while stepping{losses}"
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells)
