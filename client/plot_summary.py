"""What a file of steps comes to: steps, seconds, tokens per kind of step. Knows nothing of how it is drawn."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from client.plot_data import KINDS, RESET, STEP_KINDS, StepsLog


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
class Summary:
    """`wall_seconds` from the first line to the last, `step_seconds` of them in steps; kinds that occur, in order."""

    kinds: tuple[KindSummary, ...]
    steps: int
    step_seconds: float
    wall_seconds: float
    tokens: int
    output_tokens: int
    resets: int

    @property
    def output_tokens_per_second(self) -> float:
        """Over the wall's seconds; 0 where there are none."""
        return self.output_tokens / self.wall_seconds if self.wall_seconds else 0.0


def summarize(log: StepsLog) -> Summary:
    """Of a log with at least one step."""
    ms: list[list[float]] = [[] for _ in STEP_KINDS]
    tokens, outputs = [0.0] * len(STEP_KINDS), [0.0] * len(STEP_KINDS)
    for i, kind in enumerate(log.kinds):
        if kind < len(STEP_KINDS):
            ms[kind].append(log.ms[i])
            tokens[kind] += log.tokens[i]
            outputs[kind] += log.output_tokens[i]
    step_ms = sum(map(sum, ms))
    # A line is written when its step is done, so the first step began before the first line.
    wall_seconds = log.at_seconds[-1] - log.at_seconds[0]
    if log.kinds[0] < len(STEP_KINDS):
        wall_seconds += log.ms[0] / 1e3
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
        steps=sum(map(len, ms)),
        step_seconds=step_ms / 1e3,
        wall_seconds=max(0.0, wall_seconds),
        tokens=int(sum(tokens)),
        output_tokens=int(sum(outputs)),
        resets=log.kinds.count(KINDS.index(RESET)),
    )


def table(summary: Summary) -> Iterator[str]:
    """The summary in lines, for people."""
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
    rows.append(
        (
            "all",
            f"{summary.steps:,}",
            f"{summary.step_seconds:.2f}",
            "100%",
            "",
            f"{summary.tokens:,}",
            f"{summary.output_tokens:,}",
        )
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells)
    resets = f"; {counted(summary.resets, 'lane reset')}" if summary.resets else ""
    yield (
        f"{summary.wall_seconds:.2f} s from the first line to the last, "
        f"{summary.output_tokens_per_second:,.1f} output tokens/s{resets}"
    )


def counted(number: int, thing: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
