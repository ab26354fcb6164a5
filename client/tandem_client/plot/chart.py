"""Draws a step log as one PNG: running and waiting requests, kinds of steps, tokens per second, pages, step times.

Owns the picture. Requests and pages are sums over the workers. Milliseconds per step are coloured by kind and not by
lane, because the kind decides them first. Needs matplotlib, which the client does not depend on.
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

from tandem_client.plot.data import JOINED, RESET, STEP_KINDS, WORKER_LOST, Floats, StepsLog
from tandem_client.plot.scales import GRID, KIND_COLOURS, LEAST_MS, log_scale, number
from tandem_client.plot.series import Band, Levels, banded, kind_shares, levels, output_rates, reach, without_worker
from tandem_client.plot.summary import Summary
from tandem_client.plot.sums import draw_shares, draw_spread
from tandem_client.plural import counted

# Colours of the same set as the kinds; the lines differ in their strokes as well.
_RUNNING, _WAITING, _PREEMPTION, _PAGES, _MARK = "#000000", "#D55E00", "#0072B2", "#009E73", "#555555"
_INCHES = (16.0, 10.0)


def draw(log: StepsLog, summary: Summary, *, width: int, by_time: bool) -> bytes:
    """Returns the PNG, `width` pixels wide."""
    buffer = BytesIO()
    figure_of(log, summary, by_time=by_time).savefig(buffer, format="png", dpi=width / _INCHES[0])
    return buffer.getvalue()


def figure_of(log: StepsLog, summary: Summary, *, by_time: bool) -> Figure:
    """Returns the picture, not yet painted."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(3.2, 1))
    left = halves[0].subgridspec(5, 1, height_ratios=(3.6, 0.5, 1.6, 1.6, 2.0))
    right = halves[1].subgridspec(2, 1)
    requests = figure.add_subplot(left[0])
    strip, rates, pages, times = (figure.add_subplot(left[i], sharex=requests) for i in range(1, 5))
    x = log.seconds if by_time else log.step
    values = levels(log, by_time=by_time)
    _draw_requests(requests, values)
    _draw_strip(strip, log, x, by_time=by_time)
    _draw_rates(rates, log, x, by_time=by_time)
    _draw_pages(pages, values, log)
    _draw_times(times, log, x)
    for axes in (requests, rates, pages, times):
        _draw_marks(axes, log, x, by_time=by_time)
        axes.grid(**GRID)
        axes.set_axisbelow(True)
    _finish_left((requests, strip, rates, pages, times), reach(x, by_time=by_time), by_time=by_time)
    draw_shares(figure.add_subplot(right[0]), summary)
    draw_spread(figure.add_subplot(right[1]), log, summary)
    # The name of a file may contain the signs of a formula.
    figure.suptitle(_title(log, summary), fontsize=14, x=0.01, ha="left", parse_math=False)
    return figure


def _title(log: StepsLog, summary: Summary) -> str:
    parts = [
        log.path.name,
        counted(summary.all.steps, "step"),
        f"{summary.wall_seconds:,.1f} s",
        counted(summary.all.output_tokens, "output token"),
        f"{summary.tokens_per_second:,.0f} tokens/s while stepping",
        counted(summary.num_workers, "worker") if summary.num_workers > 1 else "",
        summary.losses,
    ]
    return "  ·  ".join(filter(None, parts))


def _draw_requests(axes: Axes, values: Levels) -> None:
    _line(axes, values.running, _RUNNING, "-", "running")
    _line(axes, values.waiting, _WAITING, (0, (4, 1.5)), "waiting")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _line(axes: Axes, band: Band, colour: str, stroke: Any, label: str) -> None:
    """Draws the mean as a line, and the range from the least to the greatest as a shade behind it."""
    axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0, step="pre")
    axes.plot(band.x, band.mean, color=colour, linestyle=stroke, drawstyle="steps-pre", label=label, lw=1.5)


def _draw_strip(axes: Axes, log: StepsLog, x: Floats, *, by_time: bool) -> None:
    edges, shares = kind_shares(log, x, by_time=by_time)
    floor = np.zeros(len(edges) - 1)
    for kind, share in zip(STEP_KINDS, shares, strict=True):
        if share.any():
            label = f"{kind} step"
            axes.stairs(floor + share, edges, baseline=floor, fill=True, color=KIND_COLOURS[kind], lw=0, label=label)
        floor = floor + share
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("share\nof time" if by_time else "kind", rotation=0, ha="right", va="center")


def _draw_rates(axes: Axes, log: StepsLog, x: Floats, *, by_time: bool) -> None:
    edges, rates = output_rates(log, x, by_time=by_time)
    axes.stairs(rates, edges, color=_RUNNING, lw=1.2)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    places = x[1:][np.diff(log.preemptions) > 0]
    if len(places):
        places = banded(places, places).x
        heights = np.full(len(places), 0.06)
        axes.plot(
            places, heights, "^", transform=axes.get_xaxis_transform(), color=_PREEMPTION, ms=5, label="preemption"
        )


def _draw_pages(axes: Axes, values: Levels, log: StepsLog) -> None:
    _line(axes, values.used_or_cached, _PAGES, (0, (1, 1)), "pages used or cached")
    _line(axes, values.used, _PAGES, "-", "pages used")
    axes.set_ylim(0, 105)
    axes.set_ylabel("pages, %")
    most = f"{log.all_pages_total.max():,.0f}"
    axes.set_title(f"pages used (line), used or cached (dotted), of {most}", fontsize=9, loc="left", pad=3)


def _draw_times(axes: Axes, log: StepsLog, x: Floats) -> None:
    for kind in STEP_KINDS:
        mine = log.kind == kind
        if mine.any():
            band = banded(x[mine], np.maximum(log.ms[mine], LEAST_MS))
            axes.vlines(band.x, band.low, band.high, color=KIND_COLOURS[kind], alpha=0.25, lw=1, zorder=1)
            axes.plot(band.x, band.mean, ".", color=KIND_COLOURS[kind], markersize=4, label=kind)
    log_scale(axes, "y")
    axes.set_ylabel("ms per step")


def _draw_marks(axes: Axes, log: StepsLog, x: Floats, *, by_time: bool) -> None:
    is_lost = log.cause == WORKER_LOST
    for label, places, stroke in (
        ("worker lost", x[is_lost], "-"),
        ("lane reset", x[(log.kind == RESET) & ~is_lost], ":"),
        ("worker joined", x[log.kind == JOINED], "--"),
    ):
        if len(places):
            axes.vlines(places, 0, 1, transform=axes.get_xaxis_transform(), color=_MARK, ls=stroke, lw=1, label=label)
    for begin, end in without_worker(log) if by_time else ():
        axes.axvspan(begin, end, color=_MARK, alpha=0.12, linewidth=0)


def _finish_left(panels: tuple[Axes, ...], ends: tuple[float, float], *, by_time: bool) -> None:
    requests, strip, rates, _, times = panels
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    strip.tick_params(bottom=False)
    room = 0.01 * (ends[1] - ends[0])
    requests.set_xlim(ends[0] - room, ends[1] + room)
    times.set_xlabel("seconds" if by_time else "step")
    number(times.xaxis, 10, integer=not by_time)
    named = {
        label: handle
        for axes in (requests, rates, strip)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    requests.legend(
        named.values(), named.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=len(named), frameon=False,
        borderaxespad=0.3, fontsize=9, columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip
