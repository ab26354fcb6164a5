"""Draws a step log as one PNG: running and waiting requests, step kinds, pages, the time of each step.

Owns the picture. With several workers, sequences and pages are summed over those that serve. Milliseconds per step are
those of all workers, by kind, because the kind decides them first, and lanes (a new one for each worker that joins)
would outnumber the colours; the boxes of `plot_sums` compare lanes. Needs matplotlib, which the client does not depend
on: the importer says what to install. Knows nothing of the file's format.
"""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tandem_client.plot.data import STEP_KINDS, StepsLog
from tandem_client.plot.lanes import lanes_of
from tandem_client.plot.levels import Levels, levels_by_step, levels_by_time
from tandem_client.plot.scales import GRID, KIND_COLOURS, log_if_wide, number_x
from tandem_client.plot.series import (
    Band,
    Floats,
    Marks,
    Shares,
    banded,
    marks_of,
    preemptions_at,
    shares_by_step,
    shares_by_time,
)
from tandem_client.plot.summary import Summary, counted
from tandem_client.plot.sums import shares, spread

# Of the same colours as the kinds; lines differ in their strokes as well.
_RUNNING, _WAITING, _PREEMPTION, _PAGES, _MARK = "#000000", "#D55E00", "#0072B2", "#009E73", "#555555"
_INCHES = (16.0, 10.0)
# A letter's width in a mark's words, as a share of the panel's.
_LETTER = 0.0068


def draw(log: StepsLog, summary: Summary, *, width: int, by_time: bool) -> bytes:
    """The PNG, `width` pixels wide."""
    figure = figure_of(log, summary, by_time=by_time)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=width / _INCHES[0])
    return buffer.getvalue()


def figure_of(log: StepsLog, summary: Summary, *, by_time: bool) -> Figure:
    """The picture, not yet painted."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(3.2, 1))
    left = halves[0].subgridspec(4, 1, height_ratios=(4.6, 0.5, 1.6, 2.2))
    right = halves[1].subgridspec(2, 1, height_ratios=(1, 1))
    sequences = figure.add_subplot(left[0])
    strip, pages, times = (figure.add_subplot(left[i], sharex=sequences) for i in (1, 2, 3))
    at = np.frombuffer(log.at_seconds)
    at = at - (at[0] - _before_first(log))
    x = at if by_time else np.frombuffer(log.step)
    spans = lanes_of(log)
    levels = levels_by_time(log, at, spans) if by_time else levels_by_step(log, x, spans)
    _sequences(sequences, levels, preemptions_at(log, x))
    _strip(strip, shares_by_time(log, at, spans) if by_time else shares_by_step(log, x), by_time=by_time)
    _pages(pages, levels, summary.num_workers)
    _times(times, log, x)
    marks = marks_of(log, x, at, spans)
    for axes in (sequences, pages, times):
        _mark(axes, marks, by_time=by_time)
    _finish_left(sequences, strip, pages, times, log, x, by_time=by_time)
    _say(sequences, marks)
    shares(figure.add_subplot(right[0]), summary)
    spread(figure.add_subplot(right[1]), log, summary)
    # A file's name and the causes in it are not formulas.
    figure.suptitle(_title(log, summary), fontsize=14, x=0.01, ha="left", parse_math=False)
    return figure


def _before_first(log: StepsLog) -> float:
    """Seconds that the first line's step took; nothing where the first line is a mark."""
    return log.ms[0] / 1e3 if log.kinds[0] < len(STEP_KINDS) else 0.0


def _title(log: StepsLog, summary: Summary) -> str:
    parts = [
        log.path.name,
        counted(summary.steps, "step"),
        f"{summary.wall_seconds:,.1f} s",
        counted(summary.output_tokens, "output token"),
        f"{summary.tokens_per_second:,.0f} tokens/s while stepping",
    ]
    if summary.num_workers > 1:
        parts.append(counted(summary.num_workers, "worker"))
    if summary.losses:
        parts.append(summary.losses)
    return "  ·  ".join(parts)


def _sequences(axes: Axes, levels: Levels, preemptions: Floats) -> None:
    _line(axes, levels.running, _RUNNING, "-", "running")
    _line(axes, levels.waiting, _WAITING, (0, (4, 1.5)), "waiting")
    if len(preemptions):
        axes.plot(
            preemptions, np.full(len(preemptions), 0.015), "^", transform=axes.get_xaxis_transform(), markersize=5,
            color=_PREEMPTION, label="preemption",
        )  # fmt: skip
    axes.set_ylabel("sequences")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _line(axes: Axes, band: Band, colour: str, stroke: Any, label: str) -> None:
    """The mean as a line; if points were merged, a shade behind it from the least to the greatest."""
    # A value holds for the whole step, which ends at x.
    if band.is_thinned:
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0, step="pre")
    marker = "o" if len(band.x) < 3 else None
    axes.plot(
        band.x, band.mean, color=colour, linestyle=stroke, drawstyle="steps-pre", marker=marker, label=label, lw=1.5
    )


def _strip(axes: Axes, shares: Shares, *, by_time: bool) -> None:
    """The share of each kind among a bin's steps, or of its time; a bin of one step has one colour."""
    floor = np.zeros(shares.of.shape[1])
    for kind, row in zip(STEP_KINDS, shares.of, strict=True):
        top = floor + row
        if row.any():
            axes.stairs(top, shares.edges, baseline=floor, fill=True, color=KIND_COLOURS[kind], lw=0, label=kind)
        floor = top
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("share\nof time" if by_time else "kind", rotation=0, ha="right", va="center")


def _pages(axes: Axes, levels: Levels, num_workers: int) -> None:
    _line(axes, levels.kept, _PAGES, (0, (1, 1)), "pages used or kept")
    _line(axes, levels.pages, _PAGES, "-", "pages used")
    axes.set_ylim(0, 105)
    axes.set_ylabel("pages, %")
    of = f"of {levels.most_pages:,}"
    if num_workers > 1:
        of = f"of all on the workers that serve, at most {of.removeprefix('of ')}"
    axes.set_title(f"pages in use, and with those kept (dotted), {of}", fontsize=9, loc="left", pad=3)


def _times(axes: Axes, log: StepsLog, x: Floats) -> None:
    kinds, ms = np.frombuffer(log.kinds, np.uint8), np.frombuffer(log.ms)
    for index, kind in enumerate(STEP_KINDS):
        mine = kinds == index
        if not mine.any():
            continue
        band = banded(x[mine], ms[mine])
        if band.is_thinned:
            axes.vlines(band.x, band.low, band.high, color=KIND_COLOURS[kind], alpha=0.25, lw=1, zorder=1)
        axes.plot(band.x, band.mean, ".", color=KIND_COLOURS[kind], markersize=4, label=kind)
    log_if_wide(axes, ms[kinds < len(STEP_KINDS)], "y")
    axes.set_ylabel("ms per step")


def _mark(axes: Axes, marks: Marks, *, by_time: bool) -> None:
    if len(marks.x):
        axes.vlines(marks.x, 0, 1, transform=axes.get_xaxis_transform(), color=_MARK, linestyle=":", lw=1.2)
    if by_time:
        for i, (begin, end) in enumerate(marks.without_worker):
            axes.axvspan(begin, end, color=_MARK, alpha=0.12, linewidth=0, label="" if i else "no worker")


def _say(axes: Axes, marks: Marks) -> None:
    if not marks.words:
        return
    # Words that would cover the ones before them stand a row lower.
    left, right = axes.get_xlim()
    ends: list[float] = []
    for x, words in zip(marks.x, marks.words, strict=True):
        row = next((row for row, end in enumerate(ends) if x >= end), len(ends))
        ends[row : row + 1] = [x + _LETTER * max(map(len, words.split("\n"))) * (right - left)]
        axes.annotate(
            words, (x, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -4 - 25 * row), textcoords="offset points",
            va="top", fontsize=9, color=_MARK, parse_math=False,
            bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5},
        )  # fmt: skip
    axes.set_ylim(top=axes.get_ylim()[1] * (1 + 0.09 * len(ends)))


def _finish_left(
    sequences: Axes, strip: Axes, pages: Axes, times: Axes, log: StepsLog, x: Floats, *, by_time: bool
) -> None:
    for axes in (sequences, pages, times):
        axes.grid(**GRID)
        axes.set_axisbelow(True)
    for axes in (sequences, strip, pages):
        axes.tick_params(labelbottom=False)
    strip.tick_params(bottom=False)
    for side in strip.spines.values():
        side.set_linewidth(0.4)
    # Step n lies between n - 1 and n.
    first, last = (0.0, float(x[-1])) if by_time else (max(0.0, float(x[0]) - 1), float(x[-1]))
    room = 0.01 * max(last - first, 1e-3)
    sequences.set_xlim(first - room, last + room)
    times.set_xlabel("seconds" if by_time else "step")
    number_x(times, 10, integer=not by_time)
    lines = sequences.get_legend_handles_labels()
    kinds = strip.get_legend_handles_labels()
    handles, labels = [*lines[0], *kinds[0]], [*lines[1], *(f"{kind} step" for kind in kinds[1])]
    sequences.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(labels), frameon=False, borderaxespad=0.3
    )
