"""Draws the memory of each layout over time as one PNG. Imports matplotlib, which the service does not need."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from scheduler_svc.simulator.memory import Run, percent

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = {"contiguous": "#D55E00", "growing": "#E69F00", "paged": "#56B4E9", "shared": "#009E73"}


def draw(path: Path, heading: Sequence[str], runs: Sequence[Run]) -> Figure:
    """Draws one strip per layout, over the same steps. Raises OSError if the file cannot be written."""
    figure = Figure(figsize=(10.0, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    strips = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run in zip(strips, runs, strict=True):
        rows, name, total = np.array(run.rows), run.layout.name, run.layout.total
        x, used, reserved = np.arange(len(rows)), *(100 * rows[:, :2].T / total)
        axes.fill_between(x, used, color=_COLOURS[name], linewidth=0, label="used")
        axes.fill_between(x, used, reserved, color=_COLOURS[name], alpha=0.3, linewidth=0, label="reserved and empty")
        mean = percent(rows[: run.last_demand + 1, 0].mean() / total)
        axes.set_title(f"{name}: {mean} used, {len(rows):,} steps in all", fontsize=10, loc="left")
        axes.set(ylim=(0, 104), yticks=range(0, 101, 25), ylabel="% of the memory")
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False, borderaxespad=0.1)
    strips[-1].set(xlim=0, xlabel="step (one token for every running sequence)")
    strips[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.suptitle("\n".join(heading), fontsize=8.5, x=0.01, ha="left")
    figure.savefig(path, format="png")
    return figure
