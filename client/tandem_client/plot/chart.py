"""Draws a step log as one PNG: running and waiting requests, kinds of steps, tokens per second, pages, step times.

Owns the picture. On its right are the seconds of each kind of step, and the duration of a step of each kind. Requests
and pages are sums over the workers. Milliseconds per step are coloured by kind and not by lane, because the kind
decides them first. With several workers, one more box per lane shows its decode steps: the lanes do the same work, so a
box that lies apart is a worker that is slower than the others. Needs matplotlib, which the client does not depend on.
"""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from tandem_client.plot import data
from tandem_client.plot.data import Summary
from tandem_contract.plural import counted

# Okabe and Ito's colours, which colour-blind readers can distinguish.
KIND_COLOURS = {"prefill": "#E69F00", "decode": "#56B4E9", "mixed": "#CC79A7"}
# The resolution of the file. A logarithmic scale cannot show 0.
LEAST_MS = 1e-3
GRID: dict[str, Any] = {"color": "#DDDDDD", "linewidth": 0.6}

# Colours of the same set as the kinds; the lines differ in their strokes as well.
_RUNNING, _WAITING, _PREEMPTION, _PAGES, _MARK = "#000000", "#D55E00", "#0072B2", "#009E73", "#555555"
_INCHES = (16.0, 10.0)


def number(axis: Axis, most: int, *, integer: bool = False) -> None:
    """Puts at most `most` numbers along the axis, with commas and without powers of ten."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=integer))
    axis.set_major_formatter("{x:,.10g}")


def log_scale(axes: Axes, which: str) -> None:
    """Makes the axis `which`, "x" or "y", logarithmic, with plain numbers at 1, 2 and 5 times the powers of ten."""
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def draw_shares(axes: Axes, summary: Summary) -> None:
    """Draws the seconds of each kind as a bar, with its share, steps and tokens as text."""
    seconds = [kind.seconds for kind in summary.kinds]
    colours = [KIND_COLOURS[kind.name] for kind in summary.kinds]
    bars = axes.barh([kind.name for kind in summary.kinds], seconds, color=colours, height=0.6)
    labels = [
        f"{kind.share:.0%}  ({kind.seconds:,.2f} s)\n{counted(kind.steps, 'step')}\n{counted(kind.tokens, 'token')}"
        for kind in summary.kinds
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_xlim(0, 1.9 * max(*seconds, 1e-6))
    axes.set_ylim(len(seconds) - 0.4, -0.6)
    axes.set_xlabel(f"seconds of the worker{'s' if summary.num_workers > 1 else ''}")
    number(axes.xaxis, 4)
    idle = max(0.0, summary.wall_seconds - summary.stepping_seconds)
    axes.set_title(f"time per kind\n{summary.stepping_seconds:,.1f} s stepping, {idle:,.1f} s idle", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw_spread(axes: Axes, log: data.StepsLog, summary: Summary) -> None:
    """Draws the milliseconds of a step of each kind, and of a decode step on each of several lanes, as boxes."""
    boxes = [(kind.name, kind.name, log.ms[log.kind == kind.name]) for kind in summary.kinds]
    for lane in summary.lanes:
        ms = log.ms[(log.kind == "decode") & (log.lane == float(lane.name.removeprefix("lane ")))]
        boxes += [(f"{lane.name}, decode", "decode", ms)] if len(ms) else []
    drawn = axes.boxplot(
        [np.maximum(ms, LEAST_MS) for _, _, ms in boxes], whis=(1, 99), showfliers=False, patch_artist=True, widths=0.5,
        tick_labels=[f"{name}\n{np.median(ms):,.2f} ms" for name, _, ms in boxes], orientation="horizontal",
        medianprops={"color": "black", "linewidth": 1.6},
    )  # fmt: skip
    for box, (_, kind, _) in zip(drawn["boxes"], boxes, strict=True):
        box.set_facecolor(KIND_COLOURS[kind])
    axes.invert_yaxis()
    log_scale(axes, "x")
    axes.set_xlabel("ms per step")
    axes.set_title("how long a step takes\nbox: 25–75 %, whiskers: 1–99 %", fontsize=10)
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw(log: data.StepsLog, summary: Summary, *, width: int, by_time: bool) -> bytes:
    """Returns the PNG, `width` pixels wide."""
    buffer = BytesIO()
    figure_of(log, summary, by_time=by_time).savefig(buffer, format="png", dpi=width / _INCHES[0])
    return buffer.getvalue()


def figure_of(log: data.StepsLog, summary: Summary, *, by_time: bool) -> Figure:
    """Returns the picture, not yet painted."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    halves = figure.add_gridspec(1, 2, width_ratios=(3.2, 1))
    left = halves[0].subgridspec(5, 1, height_ratios=(3.6, 0.5, 1.6, 1.6, 2.0))
    right = halves[1].subgridspec(2, 1)
    requests = figure.add_subplot(left[0])
    strip, rates, pages, times = (figure.add_subplot(left[i], sharex=requests) for i in range(1, 5))
    x = log.seconds if by_time else log.step
    values = data.levels(log, by_time=by_time)
    _draw_requests(requests, values)
    _draw_strip(strip, log, x, by_time=by_time)
    _draw_rates(rates, log, x, by_time=by_time)
    _draw_pages(pages, values, log)
    _draw_times(times, log, x)
    for axes in (requests, rates, pages, times):
        _draw_marks(axes, log, x, by_time=by_time)
        axes.grid(**GRID)
        axes.set_axisbelow(True)
    _finish_left((requests, strip, rates, pages, times), data.reach(x, by_time=by_time), by_time=by_time)
    draw_shares(figure.add_subplot(right[0]), summary)
    draw_spread(figure.add_subplot(right[1]), log, summary)
    # The name of a file may contain the signs of a formula.
    figure.suptitle(_title(log, summary), fontsize=14, x=0.01, ha="left", parse_math=False)
    return figure


def _title(log: data.StepsLog, summary: Summary) -> str:
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


def _draw_requests(axes: Axes, values: data.Levels) -> None:
    _line(axes, values.running, _RUNNING, "-", "running")
    _line(axes, values.waiting, _WAITING, (0, (4, 1.5)), "waiting")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _line(axes: Axes, band: data.Band, colour: str, stroke: Any, label: str) -> None:
    """Draws the mean as a line, and the range from the least to the greatest as a shade behind it."""
    axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0, step="pre")
    axes.plot(band.x, band.mean, color=colour, linestyle=stroke, drawstyle="steps-pre", label=label, lw=1.5)


def _draw_strip(axes: Axes, log: data.StepsLog, x: data.Floats, *, by_time: bool) -> None:
    edges, shares = data.kind_shares(log, x, by_time=by_time)
    floor = np.zeros(len(edges) - 1)
    for kind, share in zip(data.STEP_KINDS, shares, strict=True):
        if share.any():
            label = f"{kind} step"
            axes.stairs(floor + share, edges, baseline=floor, fill=True, color=KIND_COLOURS[kind], lw=0, label=label)
        floor = floor + share
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("share\nof time" if by_time else "kind", rotation=0, ha="right", va="center")


def _draw_rates(axes: Axes, log: data.StepsLog, x: data.Floats, *, by_time: bool) -> None:
    edges, rates = data.output_rates(log, x, by_time=by_time)
    axes.stairs(rates, edges, color=_RUNNING, lw=1.2)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    places = x[1:][np.diff(log.preemptions) > 0]
    if len(places):
        places = data.banded(places, places).x
        heights = np.full(len(places), 0.06)
        axes.plot(
            places, heights, "^", transform=axes.get_xaxis_transform(), color=_PREEMPTION, ms=5, label="preemption"
        )


def _draw_pages(axes: Axes, values: data.Levels, log: data.StepsLog) -> None:
    _line(axes, values.used_or_cached, _PAGES, (0, (1, 1)), "pages used or cached")
    _line(axes, values.used, _PAGES, "-", "pages used")
    axes.set_ylim(0, 105)
    axes.set_ylabel("pages, %")
    most = f"{log.all_pages_total.max():,.0f}"
    axes.set_title(f"pages used (line), used or cached (dotted), of {most}", fontsize=9, loc="left", pad=3)


def _draw_times(axes: Axes, log: data.StepsLog, x: data.Floats) -> None:
    for kind in data.STEP_KINDS:
        mine = log.kind == kind
        if mine.any():
            band = data.banded(x[mine], np.maximum(log.ms[mine], LEAST_MS))
            axes.vlines(band.x, band.low, band.high, color=KIND_COLOURS[kind], alpha=0.25, lw=1, zorder=1)
            axes.plot(band.x, band.mean, ".", color=KIND_COLOURS[kind], markersize=4, label=kind)
    log_scale(axes, "y")
    axes.set_ylabel("ms per step")


def _draw_marks(axes: Axes, log: data.StepsLog, x: data.Floats, *, by_time: bool) -> None:
    is_lost = log.cause == data.WORKER_LOST
    for label, places, stroke in (
        ("worker lost", x[is_lost], "-"),
        ("lane reset", x[(log.kind == data.RESET) & ~is_lost], ":"),
        ("worker joined", x[log.kind == data.JOINED], "--"),
    ):
        if len(places):
            axes.vlines(places, 0, 1, transform=axes.get_xaxis_transform(), color=_MARK, ls=stroke, lw=1, label=label)
    for begin, end in data.without_worker(log) if by_time else ():
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
