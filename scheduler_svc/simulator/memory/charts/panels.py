"""The panels of --all-panels: one bar per layout and figure, and the costs that a cache and a window save."""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from scheduler_svc.simulator.memory.charts import style
from scheduler_svc.simulator.memory.charts.figures import Figures
from scheduler_svc.simulator.memory.charts.tables import percent, scaled, size
from scheduler_svc.simulator.memory.comparison import Comparison
from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.recompute import next_token
from scheduler_svc.simulator.memory.settings import Settings

_NO_CACHE, _CACHE, _WINDOW = "#000000", "#0072B2", "#CC79A7"


def draw_panels(
    cells: Sequence[Axes], settings: Settings, geometry: Geometry, runs: Sequence[Figures], comparison: Comparison
) -> None:
    """Draws the eight panels."""
    _use(cells[0], runs)
    _running(cells[1], runs)
    _share(cells[2], runs, "internal_fragmentation", "% of the reserved memory that is empty")
    _share(cells[3], runs, "external_fragmentation", "% of the free memory outside the largest hole")
    _throughput(cells[4], runs)
    _times(cells[5], runs)
    _traffic(cells[6], comparison)
    _arithmetic(cells[7], geometry, settings)


def _bars(axes: Axes, runs: Sequence[Figures], title: str, unit: str) -> list[tuple[int, Figures, str]]:
    """Prepares one bar per layout, the first on top. Returns the place, figures and colour of each."""
    axes.set_yticks(range(len(runs)), [figures.memory for figures in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    style.draw_frame(axes, title, unit, axis="x")
    return [(place, figures, style.COLOURS[figures.memory]) for place, figures in enumerate(runs)]


def _use(axes: Axes, runs: Sequence[Figures]) -> None:
    """Draws the mean use of the memory, and the memory that sharing saves."""
    widest = 100.0
    for place, figures, colour in _bars(axes, runs, "memory", "% of the memory, mean"):
        counts = (figures.used_mean_tokens, figures.wasted_mean_tokens, figures.saved_mean_tokens)
        used, wasted, saved = (100 * count / figures.total_tokens for count in counts)
        free = 100 - used - wasted
        axes.barh(place, used, color=colour, height=0.6)
        axes.barh(place, wasted, left=used, color=colour, alpha=style.EMPTY_ALPHA, height=0.6)
        axes.barh(place, free, left=used + wasted, color=style.FREE, height=0.6)
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
    style.draw_legend(axes, {"used": 1.0, "reserved and empty": style.EMPTY_ALPHA, "free": 0.0})


def _running(axes: Axes, runs: Sequence[Figures]) -> None:
    for place, figures, colour in _bars(axes, runs, "running", "sequences"):
        axes.barh(place, figures.running_mean, color=colour, height=0.6)
        axes.text(figures.running_mean / 2, place, f"{figures.running_mean:,.1f}", ha="center", va="center", fontsize=9)
        axes.plot(figures.running_peak, place, "^", color="black", markerfacecolor=style.GREY, markersize=7)
        axes.plot(figures.fit_sequences, place, "D", color="black", markerfacecolor="white", markersize=6)
    axes.set_xlim(0, 1.08 * max(max(figures.running_peak, figures.fit_sequences) for figures in runs))
    markers = (style.marker("^", "peak"), style.marker("D", "would fit at full length", "white"))
    style.draw_legend(axes, {"mean": 1.0}, markers)


def _share(axes: Axes, runs: Sequence[Figures], name: str, unit: str) -> None:
    """Draws the figure of this name, a share."""
    for place, figures, colour in _bars(axes, runs, name.replace("_", " "), unit):
        share: float = getattr(figures, name)
        axes.barh(place, 100 * share, color=colour, height=0.6)
        axes.text(100 * share + 1, place, percent(share), va="center", fontsize=8)
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
    style.draw_legend(axes, {}, (style.marker("o", "admission"), style.marker("o", "next token", "white")))


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
    style.draw_frame(axes, "K/V read by attention", "MiB per generated token, mean", axis="x")


def _arithmetic(axes: Axes, geometry: Geometry, settings: Settings) -> None:
    longest = settings.max_length
    x = np.unique(np.geomspace(1, longest - 1, 60).astype(np.int64)).tolist() if longest > 2 else [1]
    for cached, colour, stroke, label in ((False, _NO_CACHE, "--", "no cache"), (True, _CACHE, "-", "cache")):
        flops = [next_token(geometry, context, cached=cached, window=settings.window).flops / 1e9 for context in x]
        axes.plot(x, flops, color=colour, linestyle=stroke, label=label)
    style.draw_frame(axes, "cost of the next token", "tokens of context")
    axes.set_ylabel("GFLOP", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
    axes.legend(fontsize=8, loc="upper left", frameon=False)
