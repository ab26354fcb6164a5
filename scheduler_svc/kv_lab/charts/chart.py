"""Draws a run of the lab as one PNG. Owns the picture and a colour per layout; computes no figure.

Importing this module needs matplotlib, which the service does not. `command.py` names what to install.
"""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from array import array
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from scheduler_svc.kv_lab.charts.figures import Figures, Result
from scheduler_svc.kv_lab.charts.tables import heading, in_unit, percent, scaled, size
from scheduler_svc.kv_lab.comparison import Comparison
from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.recompute import next_token
from scheduler_svc.kv_lab.settings import Settings

# Okabe and Ito's colours, which colour-blind readers can distinguish. Lines differ in their strokes as well.
COLOURS = {"contiguous": "#D55E00", "growing": "#E69F00", "paged": "#56B4E9", "shared": "#009E73"}
_NO_CACHE, _CACHE, _WINDOW, _GREY, _FREE = "#000000", "#0072B2", "#CC79A7", "#777777", "#EEEEEE"
_STRIPS_INCHES, _ALL_INCHES, _DPI = (10.0, 9.0), (18.0, 11.5), 100
_BINS = 500
_GRID: dict[str, Any] = {"color": "#DDDDDD", "linewidth": 0.6}
_EMPTY_ALPHA = 0.3

Floats = npt.NDArray[np.float64]


def draw(
    settings: Settings, geometry: Geometry, results: Sequence[Result], comparison: Comparison, *, all_panels: bool
) -> bytes:
    """Returns the picture as a PNG."""
    buffer = BytesIO()
    figure = figure_of(settings, geometry, results, comparison, all_panels=all_panels)
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def figure_of(
    settings: Settings, geometry: Geometry, results: Sequence[Result], comparison: Comparison, *, all_panels: bool
) -> Figure:
    """Lays out the memory of each layout over time and, with `all_panels`, the other figures beside it."""
    figure = Figure(figsize=_ALL_INCHES if all_panels else _STRIPS_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(1, 1.45)) if all_panels else figure.add_gridspec(1, 1)
    strips = halves[0].subgridspec(len(results), 1)
    first: Axes | None = None
    for at, result in enumerate(results):
        axes = figure.add_subplot(strips[at], sharex=first)
        _memory(axes, result, has_legend=first is None, is_last=at == len(results) - 1)
        first = first or axes
    if all_panels:
        panels = halves[1].subgridspec(4, 2)
        cells = [figure.add_subplot(panels[row, column]) for row in range(4) for column in range(2)]
        runs = [result.figures for result in results]
        for axes, panel in zip(cells, (_use, _running, _internal, _external, _throughput, _times), strict=False):
            panel(axes, runs)
        _traffic(cells[6], comparison)
        _arithmetic(cells[7], geometry, settings)
    # Names that a user gives are not formulas.
    words, points = "\n".join(heading(settings, geometry)), 11 if all_panels else 8.5
    figure.suptitle(words, fontsize=points, x=0.01, ha="left", parse_math=False)
    return figure


def _binned(values: "array[int]", bins: int) -> Floats:
    """Returns the means of at most `bins` runs of steps."""
    all_values = np.frombuffer(values, np.int64).astype(np.float64)
    edges = np.linspace(0, len(all_values), min(bins, len(all_values)) + 1).astype(np.int64)
    return np.add.reduceat(all_values, edges[:-1]) / np.diff(edges)


def _memory(axes: Axes, result: Result, *, has_legend: bool, is_last: bool) -> None:
    """Draws used and reserved memory over the steps."""
    figures, steps = result.figures, result.record.steps
    colour, total = COLOURS[figures.memory], figures.total_tokens
    used, reserved = (100 * _binned(values, _BINS) / total for values in (steps.used, steps.reserved))
    x = np.linspace(0, figures.steps, len(used))
    axes.fill_between(x, used, color=colour, linewidth=0)
    axes.fill_between(x, used, reserved, color=colour, alpha=_EMPTY_ALPHA, linewidth=0)
    axes.plot([figures.steps] * 2, [0, 100], color="#555555", linestyle=":", lw=1.2)
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("% of the memory")
    axes.set_xlim(left=0)
    scale, unit = in_unit(total * figures.token_bytes)
    in_bytes = axes.secondary_yaxis("right", functions=(_times_factor(scale / 100), _times_factor(100 / scale)))
    in_bytes.set_ylabel(unit)
    _title(axes, f"{figures.memory}: {percent(figures.utilisation_mean)} used, {figures.steps:,} steps in all")
    _grid(axes)
    if has_legend:
        _legend(axes, {"used": 1.0, "reserved and empty": _EMPTY_ALPHA})
    axes.tick_params(labelbottom=is_last)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    if is_last:
        axes.set_xlabel("step (one token for every running sequence)")


def _times_factor(factor: float) -> Callable[[npt.ArrayLike], npt.ArrayLike]:
    return lambda values: np.asarray(values, np.float64) * factor


def _thousands(value: float, _position: int | None) -> str:
    return f"{value:,.0f}"


def _title(axes: Axes, words: str) -> None:
    axes.set_title(words, fontsize=10, loc="left", pad=4)


def _legend(axes: Axes, shades: dict[str, float], markers: Sequence[Line2D] = ()) -> None:
    """Draws a legend of grey patches and of markers beside the title, because each layout has its own colour."""
    patches = [
        Patch(facecolor=_GREY if alpha else _FREE, alpha=alpha or 1.0, label=label) for label, alpha in shades.items()
    ]
    axes.legend(
        handles=[*patches, *markers], loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False,
        borderaxespad=0.1, columnspacing=1.0, handletextpad=0.4,
    )  # fmt: skip


def _marker(style: str, label: str, fill: str = _GREY) -> Line2D:
    return Line2D([], [], linestyle="", marker=style, color="black", markerfacecolor=fill, label=label)


def _grid(axes: Axes, **which: Any) -> None:
    axes.grid(**which, **_GRID)
    axes.set_axisbelow(True)


def _bars(axes: Axes, runs: Sequence[Figures], title: str, unit: str) -> list[tuple[int, Figures, str]]:
    """Prepares one bar per layout, the first on top. Returns the place, figures and colour of each."""
    axes.set_yticks(range(len(runs)), [figures.memory for figures in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    _title(axes, title)
    axes.set_xlabel(unit, fontsize=9)
    _grid(axes, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    return [(place, figures, COLOURS[figures.memory]) for place, figures in enumerate(runs)]


def _use(axes: Axes, runs: Sequence[Figures]) -> None:
    """Draws the mean use of the memory, and the memory that sharing saves."""
    widest = 100.0
    for place, figures, colour in _bars(axes, runs, "memory", "% of the memory, mean"):
        used, wasted, free, saved = (
            100 * part / figures.total_tokens
            for part in (
                figures.used_mean_tokens,
                figures.wasted_mean_tokens,
                figures.free_mean_tokens + figures.overhead_tokens,
                figures.saved_mean_tokens,
            )
        )
        axes.barh(place, used, color=colour, height=0.6)
        axes.barh(place, wasted, left=used, color=colour, alpha=_EMPTY_ALPHA, height=0.6)
        axes.barh(place, free, left=used + wasted, color=_FREE, height=0.6)
        axes.text(used / 2, place, f"{used:.0f} %", ha="center", va="center", fontsize=9)
        if wasted >= 12:
            axes.text(used + wasted / 2, place, f"{wasted:.0f} %", ha="center", va="center", fontsize=8)
        if free >= 12:
            axes.text(100 - free / 2, place, f"{free:.0f} %", ha="center", va="center", fontsize=8)
        if saved >= 1:
            axes.barh(place, saved, left=100, fill=False, edgecolor=colour, linestyle="--", height=0.6)
            axes.text(102 + saved, place, f"{saved:.0f} % saved\nby sharing", va="center", fontsize=8)
            widest = max(widest, 130 + saved)
    axes.set_xlim(0, 1.02 * widest)
    _legend(axes, {"used": 1.0, "reserved and empty": _EMPTY_ALPHA, "free": 0.0})


def _running(axes: Axes, runs: Sequence[Figures]) -> None:
    for place, figures, colour in _bars(axes, runs, "running", "sequences"):
        axes.barh(place, figures.running_mean, color=colour, height=0.6)
        axes.text(figures.running_mean / 2, place, f"{figures.running_mean:,.1f}", ha="center", va="center", fontsize=9)
        axes.plot(figures.running_peak, place, "^", color="black", markerfacecolor=_GREY, markersize=7)
        axes.plot(figures.fit_sequences, place, "D", color="black", markerfacecolor="white", markersize=6)
    axes.set_xlim(0, 1.08 * max(max(figures.running_peak, figures.fit_sequences) for figures in runs))
    _legend(axes, {"mean": 1.0}, (_marker("^", "peak"), _marker("D", "would fit at full length", "white")))


def _internal(axes: Axes, runs: Sequence[Figures]) -> None:
    title = "internal fragmentation"
    _shares(axes, runs, title, "% of the reserved memory that is empty", lambda f: f.internal_fragmentation)


def _external(axes: Axes, runs: Sequence[Figures]) -> None:
    title = "external fragmentation"
    _shares(axes, runs, title, "% of the free memory outside the largest hole", lambda f: f.external_fragmentation)


def _shares(axes: Axes, runs: Sequence[Figures], title: str, unit: str, share: Callable[[Figures], float]) -> None:
    for place, figures, colour in _bars(axes, runs, title, unit):
        axes.barh(place, 100 * share(figures), color=colour, height=0.6)
        axes.text(100 * share(figures) + 1, place, percent(share(figures)), va="center", fontsize=8)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))


def _throughput(axes: Axes, runs: Sequence[Figures]) -> None:
    """Draws the tokens that the memory allows per step, with the preemptions that they cost."""
    largest = max(figures.decoded_per_step for figures in runs)
    for place, figures, colour in _bars(axes, runs, "throughput", "tokens generated per step"):
        axes.barh(place, figures.decoded_per_step, color=colour, height=0.6)
        words = f"{figures.decoded_per_step:,.1f}"
        if figures.preemptions:
            recomputed = scaled(figures.recomputed_tokens, "").strip()
            words += f"\n{figures.preemptions:,} preemptions, {recomputed} tokens recomputed"
        axes.text(figures.decoded_per_step + 0.015 * largest, place, words, va="center", fontsize=8)
    axes.set_xlim(0, 2.3 * largest)


def _times(axes: Axes, runs: Sequence[Figures]) -> None:
    for place, figures, colour in _bars(axes, runs, "time of a call", "µs, median to p99, measured in Python"):
        for spread, shift, fill in ((figures.allocate, -0.17, colour), (figures.grow, 0.17, "white")):
            if not spread.calls:
                continue
            axes.plot([spread.median_us, spread.p99_us], [place + shift] * 2, color=colour, lw=2)
            axes.plot(spread.median_us, place + shift, "o", color=colour, markerfacecolor=fill, markersize=7)
            axes.annotate(
                f"{_short(spread.median_us)} – {_short(spread.p99_us)}", (spread.p99_us, place + shift),
                xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.2)
    _legend(axes, {}, (_marker("o", "admission"), _marker("o", "next token", "white")))


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _traffic(axes: Axes, comparison: Comparison) -> None:
    """Draws the bytes that attention reads per token, with full attention and with windows."""
    if not comparison.windows:
        axes.set_axis_off()
        return
    full = comparison.windows[0].full_bytes
    names = ["full", *(f"{window.window:,}" for window in comparison.windows)]
    sizes = [full, *(window.bytes for window in comparison.windows)]
    words = [size(full), *(f"{size(window.bytes)}, − {percent(window.saved)}" for window in comparison.windows)]
    colours = [_CACHE] + [_WINDOW] * (len(names) - 1)
    bars = axes.barh(names, [value / 2**20 for value in sizes], color=colours, height=0.6)
    axes.bar_label(bars, words, padding=4, fontsize=8)
    axes.set_xlim(0, 1.45 * full / 2**20)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_ylabel("window, tokens", fontsize=9)
    axes.set_xlabel("MiB per generated token, mean", fontsize=9)
    _title(axes, "K/V read by attention")
    _grid(axes, axis="x")
    axes.spines[["top", "right"]].set_visible(False)


def _arithmetic(axes: Axes, geometry: Geometry, settings: Settings) -> None:
    longest = settings.max_length
    x = np.unique(np.geomspace(1, longest - 1, 60).astype(np.int64)).tolist() if longest > 2 else [1]
    for cached, colour, stroke, label in ((False, _NO_CACHE, "--", "no cache"), (True, _CACHE, "-", "cache")):
        flops = [next_token(geometry, context, cached=cached, window=settings.window).flops / 1e9 for context in x]
        axes.plot(x, flops, color=colour, linestyle=stroke, label=label)
    _title(axes, "cost of the next token")
    axes.set_ylabel("GFLOP", fontsize=9)
    axes.set_xlabel("tokens of context", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    _grid(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left", frameon=False)
