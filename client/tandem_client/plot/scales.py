"""Colours, scales and their numbers in the picture of steps. Needs matplotlib; knows nothing of the file."""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tandem_client.plot.series import Floats

# Okabe and Ito's colours, which colour-blind readers can distinguish too.
KIND_COLOURS = {"prefill": "#E69F00", "decode": "#56B4E9", "mixed": "#CC79A7"}
GRID: dict[str, Any] = {"color": "#DDDDDD", "linewidth": 0.6}


def number_x(axes: Axes, most: int, *, integer: bool = False) -> None:
    """Limits the numbers along x, which have commas and never powers."""
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=integer))
    axes.xaxis.set_major_formatter(FuncFormatter(_with_commas))


def log_if_wide(axes: Axes, values: Floats, which: str) -> None:
    """A logarithmic scale along `which`, "x" or "y", in plain numbers, where the values differ much."""
    positive = values[values > 0]
    if not len(positive) or positive.max() <= 8 * positive.min():
        return
    (axes.set_yscale if which == "y" else axes.set_xscale)("log", nonpositive="clip")
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(_plain))
    # Less than two decades have too few powers of ten to read by.
    few = positive.max() < 100 * positive.min()
    axis.set_minor_formatter(FuncFormatter(_plain_at_2_and_5 if few else _nothing))


def _with_commas(value: float, position: float | None) -> str:
    return f"{value:,.10g}"


def _plain(value: float, position: float | None) -> str:
    return f"{value:g}"


def _plain_at_2_and_5(value: float, position: float | None) -> str:
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def _nothing(value: float, position: float | None) -> str:
    return ""
