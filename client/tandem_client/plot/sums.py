"""The right side of the plot: the seconds of each kind of step, and the duration of a step of each kind.

With several workers, one more box per lane shows its decode steps. The lanes do the same work, so a box that lies apart
is a worker that is slower than the others. Needs matplotlib.
"""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tandem_client.plot.data import Floats, StepsLog
from tandem_client.plot.scales import GRID, KIND_COLOURS, LEAST_MS, log_scale, number
from tandem_client.plot.summary import Summary
from tandem_client.plural import counted


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


def draw_spread(axes: Axes, log: StepsLog, summary: Summary) -> None:
    """Draws the milliseconds of a step of each kind, and of a decode step on each of several lanes, as boxes."""
    boxes = [_box(kind.name, log.ms[log.kind == kind.name]) for kind in summary.kinds]
    colours = [KIND_COLOURS[kind.name] for kind in summary.kinds]
    for lane in summary.lanes:
        ms = log.ms[(log.kind == "decode") & (log.lane == float(lane.name.removeprefix("lane ")))]
        if len(ms):
            boxes.append(_box(f"{lane.name}, decode", ms))
            colours.append(KIND_COLOURS["decode"])
    drawn = axes.bxp(
        boxes, orientation="horizontal", showfliers=False, patch_artist=True, widths=0.5,
        medianprops={"color": "black", "linewidth": 1.6},
    )  # fmt: skip
    for box, colour in zip(drawn["boxes"], colours, strict=True):
        box.set_facecolor(colour)
    axes.invert_yaxis()
    log_scale(axes, "x")
    axes.set_xlabel("ms per step")
    axes.set_title("how long a step takes\nbox: 25–75 %, whiskers: 1–99 %", fontsize=10)
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _box(name: str, ms: Floats) -> dict[str, Any]:
    low, first, middle, third, high = np.percentile(np.maximum(ms, LEAST_MS), (1, 25, 50, 75, 99)).tolist()
    label = f"{name}\n{middle:,.2f} ms"
    return {"label": label, "whislo": low, "q1": first, "med": middle, "q3": third, "whishi": high}
