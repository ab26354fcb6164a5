"""Colours, scales and number formats of the plot. Needs matplotlib; does not use the file's data."""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# Okabe and Ito's colours, which colour-blind readers can distinguish.
KIND_COLOURS = {"prefill": "#E69F00", "decode": "#56B4E9", "mixed": "#CC79A7"}
# The resolution of the file. A logarithmic scale cannot show 0.
LEAST_MS = 1e-3
GRID: dict[str, Any] = {"color": "#DDDDDD", "linewidth": 0.6}


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
