"""The style that all panels share: colours, titles, grids and legends."""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

# Okabe and Ito's colours, which colour-blind readers can distinguish. Lines differ in their strokes as well.
COLOURS = {"contiguous": "#D55E00", "growing": "#E69F00", "paged": "#56B4E9", "shared": "#009E73"}
GREY, FREE = "#777777", "#EEEEEE"
EMPTY_ALPHA = 0.3
_GRID: dict[str, Any] = {"color": "#DDDDDD", "linewidth": 0.6}


def set_title(axes: Axes, words: str) -> None:
    axes.set_title(words, fontsize=10, loc="left", pad=4)


def draw_grid(axes: Axes, **which: Any) -> None:
    axes.grid(**which, **_GRID)
    axes.set_axisbelow(True)


def draw_frame(axes: Axes, title: str, x_label: str, **grid: Any) -> None:
    """Draws the title, the x label and the grid of a panel without borders at its top and right."""
    set_title(axes, title)
    axes.set_xlabel(x_label, fontsize=9)
    draw_grid(axes, **grid)
    axes.spines[["top", "right"]].set_visible(False)


def draw_legend(axes: Axes, shades: dict[str, float], markers: Sequence[Line2D] = ()) -> None:
    """Draws a legend of grey patches and of markers beside the title, because each layout has its own colour."""
    patches = [
        Patch(facecolor=GREY if alpha else FREE, alpha=alpha or 1.0, label=label) for label, alpha in shades.items()
    ]
    axes.legend(
        handles=[*patches, *markers], loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False,
        borderaxespad=0.1, columnspacing=1.0, handletextpad=0.4,
    )  # fmt: skip


def marker(style: str, label: str, fill: str = GREY) -> Line2D:
    return Line2D([], [], linestyle="", marker=style, color="black", markerfacecolor=fill, label=label)


def thousands(value: float, _position: int | None) -> str:
    return f"{value:,.0f}"
