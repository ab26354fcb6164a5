"""Draws a run of the lab as one PNG. Owns the layout of the picture and the panels of memory over time.

Importing this module needs matplotlib, which the service does not. `command.py` names what to install.
"""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scheduler_svc.simulator.memory.charts.figures import Result
from scheduler_svc.simulator.memory.charts.panels import draw_panels
from scheduler_svc.simulator.memory.charts.style import (
    COLOURS,
    EMPTY_ALPHA,
    draw_grid,
    draw_legend,
    set_title,
    thousands,
)
from scheduler_svc.simulator.memory.charts.tables import heading, in_unit, percent
from scheduler_svc.simulator.memory.comparison import Comparison
from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.settings import Settings

_STRIPS_INCHES, _ALL_INCHES = (10.0, 9.0), (18.0, 11.5)
_BINS = 500


def figure_of(
    settings: Settings, geometry: Geometry, results: Sequence[Result], comparison: Comparison, *, all_panels: bool
) -> Figure:
    """Draws the memory of each layout over time and, with `all_panels`, the other figures beside it."""
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
        draw_panels(cells, settings, geometry, [result.figures for result in results], comparison)
    words, points = "\n".join(heading(settings, geometry)), 11 if all_panels else 8.5
    # parse_math=False, because names that a user gives are not formulas.
    figure.suptitle(words, fontsize=points, x=0.01, ha="left", parse_math=False)
    return figure


def _binned(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns the means of at most 500 runs of steps."""
    edges = np.linspace(0, len(values), min(_BINS, len(values)) + 1).astype(np.int64)
    return np.add.reduceat(values.astype(np.float64), edges[:-1]) / np.diff(edges)


def _memory(axes: Axes, result: Result, *, has_legend: bool, is_last: bool) -> None:
    """Draws used and reserved memory over the steps."""
    figures, steps = result.figures, result.record.steps
    colour, total = COLOURS[figures.memory], figures.total_tokens
    used, reserved = (100 * _binned(steps[name]) / total for name in ("used", "reserved"))
    x = np.linspace(0, len(steps), len(used))
    axes.fill_between(x, used, color=colour, linewidth=0)
    axes.fill_between(x, used, reserved, color=colour, alpha=EMPTY_ALPHA, linewidth=0)
    axes.plot([figures.steps] * 2, [0, 100], color="#555555", linestyle=":", lw=1.2)
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("% of the memory")
    axes.set_xlim(left=0)
    scale, unit = in_unit(total * figures.token_bytes)
    in_bytes = axes.secondary_yaxis("right", functions=(_times_factor(scale / 100), _times_factor(100 / scale)))
    in_bytes.set_ylabel(unit)
    set_title(axes, f"{figures.memory}: {percent(figures.utilisation_mean)} used, {figures.steps:,} steps in all")
    draw_grid(axes)
    if has_legend:
        draw_legend(axes, {"used": 1.0, "reserved and empty": EMPTY_ALPHA})
    axes.tick_params(labelbottom=is_last)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    if is_last:
        axes.set_xlabel("step (one token for every running sequence)")


def _times_factor(factor: float) -> Callable[[npt.ArrayLike], npt.ArrayLike]:
    return lambda values: np.asarray(values, np.float64) * factor
