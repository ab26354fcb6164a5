"""Draws a run of the lab as one PNG. Owns the picture and a colour per layout; computes no figure.

Needs matplotlib, which the service does not: whoever imports this module says what to install.
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
from matplotlib.ticker import FuncFormatter

from scheduler_svc.kv_lab.charts.figures import Figures
from scheduler_svc.kv_lab.charts.words import heading, in_unit, percent, scaled, size
from scheduler_svc.kv_lab.comparison import Comparison
from scheduler_svc.kv_lab.geometry import Geometry
from scheduler_svc.kv_lab.recompute import next_token
from scheduler_svc.kv_lab.run import Life
from scheduler_svc.kv_lab.settings import Settings

# Okabe and Ito's colours, told apart by colour-blind eyes too; lines differ in their strokes as well.
COLOURS = {"contiguous": "#D55E00", "growing": "#E69F00", "paged": "#56B4E9", "shared": "#009E73"}
_NO_CACHE, _CACHE, _WINDOW, _NONE = "#000000", "#0072B2", "#CC79A7", "#EEEEEE"
_INCHES, _DPI = (18.0, 11.5), 100
_BINS = 500
_GRID: dict[str, Any] = {"color": "#DDDDDD", "linewidth": 0.6}
_EMPTY_ALPHA = 0.3

Drawn = Sequence[tuple[Life, Figures]]
Floats = npt.NDArray[np.float64]


def draw(settings: Settings, geometry: Geometry, runs: Drawn, comparison: Comparison) -> bytes:
    """The PNG."""
    buffer = BytesIO()
    figure_of(settings, geometry, runs, comparison).savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def figure_of(settings: Settings, geometry: Geometry, runs: Drawn, comparison: Comparison) -> Figure:
    """The picture, not yet painted."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(1, 1.45))
    strips = halves[0].subgridspec(len(runs), 1)
    panels = halves[1].subgridspec(4, 2)
    first: Axes | None = None
    for at, (life, figures) in enumerate(runs):
        axes = figure.add_subplot(strips[at], sharex=first)
        first = first or axes
        _memory(axes, life, figures, is_last=at == len(runs) - 1)
    told = [figures for _, figures in runs]
    drawings = (_where, _fragmentation, _at_once, _steps, _times)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    cells = [figure.add_subplot(panels[row, column]) for row, column in places]
    for axes, drawing in zip(cells, drawings, strict=False):
        drawing(axes, told)
    _traffic(cells[5], comparison)
    _arithmetic(cells[6], geometry, settings, comparison)
    # What a user names is no formula.
    figure.suptitle("\n".join(heading(settings, geometry)), fontsize=11, x=0.01, ha="left", parse_math=False)
    return figure


def _binned(values: "array[int]", bins: int) -> Floats:
    """Means of runs of steps, at most `bins` of them."""
    all_values = np.frombuffer(values, np.int64).astype(np.float64)
    edges = np.linspace(0, len(all_values), min(bins, len(all_values)) + 1).astype(np.int64)
    return np.add.reduceat(all_values, edges[:-1]) / np.diff(edges)


def _memory(axes: Axes, life: Life, figures: Figures, *, is_last: bool) -> None:
    """Used and reserved, over the steps."""
    colour, total = COLOURS[figures.memory], figures.total_tokens
    used, reserved = (100 * _binned(values, _BINS) / total for values in (life.steps.used, life.steps.reserved))
    x = np.linspace(0, figures.steps, len(used))
    axes.fill_between(x, used, color=colour, linewidth=0, label="used")
    axes.fill_between(x, used, reserved, color=colour, alpha=_EMPTY_ALPHA, linewidth=0, label="reserved and empty")
    axes.plot([figures.steps] * 2, [0, 100], color="#555555", linestyle=":", lw=1.2)
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("% of the memory")
    axes.set_xlim(left=0)
    scale, unit = in_unit(total * figures.token_bytes)
    in_bytes = axes.secondary_yaxis("right", functions=(_times_factor(scale / 100), _times_factor(100 / scale)))
    in_bytes.set_ylabel(unit)
    axes.set_title(
        f"{figures.memory}: {percent(figures.utilisation_mean)} used, all ended after {figures.steps:,} steps",
        fontsize=10, loc="left", pad=4,
    )  # fmt: skip
    axes.grid(**_GRID)
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False, borderaxespad=0.1,
    )  # fmt: skip
    axes.tick_params(labelbottom=is_last)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    if is_last:
        axes.set_xlabel("step (one token for every running sequence)")


def _times_factor(factor: float) -> Callable[[npt.ArrayLike], npt.ArrayLike]:
    return lambda values: np.asarray(values, np.float64) * factor


def _thousands(value: float, _position: int | None) -> str:
    return f"{value:,.0f}"


def _bars(axes: Axes, told: Sequence[Figures], title: str, unit: str) -> list[int]:
    """Room for one bar per layout, the first on top; their places."""
    places = list(range(len(told)))
    axes.set_yticks(places, [figures.memory for figures in told])
    axes.set_ylim(len(told) - 0.4, -0.6)
    axes.set_title(title, fontsize=10, loc="left", pad=4)
    axes.set_xlabel(unit, fontsize=9)
    axes.grid(axis="x", **_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return places


def _where(axes: Axes, told: Sequence[Figures]) -> None:
    """What the memory is used for, and what it would take more without sharing."""
    widest, title = 100.0, "memory: used, reserved and empty (pale), free (grey)"
    for place, figures in zip(_bars(axes, told, title, "% of the memory, mean"), told, strict=True):
        colour = COLOURS[figures.memory]
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
        axes.barh(place, free, left=used + wasted, color=_NONE, height=0.6)
        axes.text(used / 2, place, f"{used:.0f} %", ha="center", va="center", fontsize=9, color="black")
        if wasted >= 12:
            axes.text(used + wasted / 2, place, f"{wasted:.0f} %", ha="center", va="center", fontsize=8)
        if free >= 12:
            axes.text(100 - free / 2, place, f"{free:.0f} %", ha="center", va="center", fontsize=8)
        if saved >= 1:
            axes.barh(place, saved, left=100, fill=False, edgecolor=colour, linestyle="--", height=0.6)
            axes.text(102 + saved, place, f"{saved:.0f} % saved\nby sharing", va="center", fontsize=8)
            widest = max(widest, 130 + saved)
    axes.set_xlim(0, 1.02 * widest)


def _fragmentation(axes: Axes, told: Sequence[Figures]) -> None:
    title = "fragmentation: internal (solid), external (hatched)"
    for place, figures in zip(_bars(axes, told, title, "% of what is reserved; of what is free"), told, strict=True):
        colour = COLOURS[figures.memory]
        inside, between = 100 * figures.internal_fragmentation, 100 * figures.external_fragmentation
        axes.barh(place - 0.18, inside, color=colour, height=0.32)
        axes.barh(place + 0.18, between, facecolor="white", edgecolor=colour, hatch="////", height=0.32)
        axes.text(inside + 1, place - 0.18, percent(inside / 100), va="center", fontsize=8)
        axes.text(between + 1, place + 0.18, percent(between / 100), va="center", fontsize=8)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))


def _at_once(axes: Axes, told: Sequence[Figures]) -> None:
    title = "sequences at once: mean (bar), peak ▲, fit whole ◇"
    for place, figures in zip(_bars(axes, told, title, "sequences"), told, strict=True):
        axes.barh(place, figures.running_mean, color=COLOURS[figures.memory], height=0.6)
        axes.text(figures.running_mean / 2, place, f"{figures.running_mean:,.1f}", ha="center", va="center", fontsize=9)
        axes.plot(figures.running_peak, place, "^", color="black", markersize=7)
        axes.plot(figures.fit_sequences, place, "D", color="black", markerfacecolor="white", markersize=6)
    axes.set_xlim(0, 1.08 * max(max(figures.running_peak, figures.fit_sequences) for figures in told))


def _steps(axes: Axes, told: Sequence[Figures]) -> None:
    """Tokens that had to be computed, beside what the memory lets run in a step."""
    title = "tokens generated per step"
    most = max(figures.decoded_per_step for figures in told)
    for place, figures in zip(_bars(axes, told, title, "tokens per step"), told, strict=True):
        axes.barh(place, figures.decoded_per_step, color=COLOURS[figures.memory], height=0.6)
        words = f"{figures.decoded_per_step:,.1f}"
        if figures.preemptions:
            again = scaled(figures.recomputed_tokens, "").strip()
            words += f"\n{figures.preemptions:,} preempted, {again} tokens again"
        axes.text(figures.decoded_per_step + 0.015 * most, place, words, va="center", fontsize=8)
    axes.set_xlim(0, 2.0 * most)


def _times(axes: Axes, told: Sequence[Figures]) -> None:
    title = "time of a call, median to 99 %: sequence ●, token ○"
    for place, figures in zip(_bars(axes, told, title, "µs, measured in Python"), told, strict=True):
        for spread, shift, fill in ((figures.allocate, -0.17, COLOURS[figures.memory]), (figures.grow, 0.17, "white")):
            if not spread.calls:
                continue
            axes.plot([spread.median_us, spread.p99_us], [place + shift] * 2, color=COLOURS[figures.memory], lw=2)
            axes.plot(
                spread.median_us, place + shift, "o", color=COLOURS[figures.memory], markerfacecolor=fill, markersize=7
            )
            axes.annotate(
                f"{_short(spread.median_us)} – {_short(spread.p99_us)}", (spread.p99_us, place + shift),
                xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.2)


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _traffic(axes: Axes, comparison: Comparison) -> None:
    """Bytes that attention reads per token, whole and windowed."""
    if not comparison.windows:
        axes.set_axis_off()
        return
    full = comparison.windows[0].full_bytes
    names = ["all", *(f"{window.window:,}" for window in comparison.windows)]
    sizes = [full, *(window.bytes for window in comparison.windows)]
    words = [size(full), *(f"{size(window.bytes)}, − {percent(window.saved)}" for window in comparison.windows)]
    bars = axes.barh(
        names, [value / 2**20 for value in sizes], color=[_CACHE] + [_WINDOW] * (len(names) - 1), height=0.6
    )
    axes.bar_label(bars, words, padding=4, fontsize=8)
    axes.set_xlim(0, 1.45 * full / 2**20)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_ylabel("window, tokens", fontsize=9)
    axes.set_xlabel("MiB", fontsize=9)
    axes.set_title("K/V read per generated token, mean", fontsize=10, loc="left", pad=4)
    axes.grid(axis="x", **_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _arithmetic(axes: Axes, geometry: Geometry, settings: Settings, comparison: Comparison) -> None:
    longest = settings.max_length
    x = np.unique(np.geomspace(1, longest - 1, 60).astype(np.int64)).tolist() if longest > 2 else [1]
    for cached, colour, stroke, label in ((False, _NO_CACHE, "--", "no cache"), (True, _CACHE, "-", "cache")):
        flops = [next_token(geometry, context, cached=cached, window=settings.window).flops / 1e9 for context in x]
        axes.plot(x, flops, color=colour, linestyle=stroke, label=label)
    last = comparison.lengths[-1]
    axes.set_title(
        f"cost of a token; all {last.length:,}: {last.flops_ratio:,.0f} × the FLOPs", fontsize=10, loc="left", pad=4
    )
    axes.set_ylabel("GFLOP", fontsize=9)
    _curves(axes, "tokens of context")


def _curves(axes: Axes, x: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_xlabel(x, fontsize=9)
    axes.grid(**_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left", frameon=False)
