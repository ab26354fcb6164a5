"""The right side of the picture of steps: seconds of each kind, and the duration of a step of each.

With several workers also how long a step of the commonest kind takes on each: they do the same work, so a box that lies
apart is a worker that is slower than the others. Needs matplotlib; knows nothing of the file's format.
"""

# matplotlib types its keyword arguments as unknown, so every one of its methods is partially unknown.
# pyright: reportUnknownMemberType=false

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tandem_client.plot.data import KINDS, STEP_KINDS, StepsLog
from tandem_client.plot.scales import GRID, KIND_COLOURS, log_if_wide, number_x
from tandem_client.plot.series import Floats
from tandem_client.plot.summary import Summary, counted

# Lanes that get a box, those with most steps; more could not be read.
_MOST_BOXES = 8


def shares(axes: Axes, summary: Summary) -> None:
    """Seconds of each kind, the share in words."""
    names = [kind.kind for kind in summary.kinds]
    seconds = [kind.seconds for kind in summary.kinds]
    bars = axes.barh(names, seconds, color=[KIND_COLOURS[name] for name in names], height=0.6)
    words = [
        f"{kind.share:.0%}  ({kind.seconds:,.2f} s)\n{counted(kind.steps, 'step')}\n{counted(kind.tokens, 'token')}"
        for kind in summary.kinds
    ]
    axes.bar_label(bars, words, padding=4, fontsize=9)
    axes.set_xlim(0, 1.9 * max(*seconds, 1e-6))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(f"seconds of the worker{'s' if summary.num_workers > 1 else ''}")
    number_x(axes, 4)
    idle = max(0.0, summary.worker_seconds - summary.busy_seconds)
    axes.set_title(f"time per kind\n{summary.busy_seconds:,.1f} s busy, {idle:,.1f} s idle", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def spread(axes: Axes, log: StepsLog, summary: Summary) -> None:
    """Milliseconds of a step per kind, and per lane: middle half as a box, 1st to 99th percentile as whiskers."""
    kinds, ms = np.frombuffer(log.kinds, np.uint8), np.frombuffer(log.ms)
    boxes = [_box(kind.kind, ms[kinds == KINDS.index(kind.kind)]) for kind in summary.kinds]
    colours = [KIND_COLOURS[kind.kind] for kind in summary.kinds]
    title = "how long a step takes"
    if summary.lanes:
        commonest = max(summary.kinds, key=lambda kind: kind.steps).kind
        lane = np.frombuffer(log.lane)
        is_it = kinds == KINDS.index(commonest)
        for one in sorted(sorted(summary.lanes, key=lambda one: -one.steps)[:_MOST_BOXES], key=lambda one: one.lane):
            mine = ms[is_it & (lane == one.lane)]
            if len(mine):
                boxes.append(_box(f"lane {one.lane:g}", mine))
                colours.append(KIND_COLOURS[commonest])
        title += f" (lanes: {commonest})"
    drawn = axes.bxp(
        boxes, orientation="horizontal", showfliers=False, patch_artist=True, widths=0.5,
        medianprops={"color": "black", "linewidth": 1.6},
    )  # fmt: skip
    for box, colour in zip(drawn["boxes"], colours, strict=True):
        box.set_facecolor(colour)
    axes.invert_yaxis()
    log_if_wide(axes, ms[kinds < len(STEP_KINDS)], "x")
    axes.set_xlabel("ms per step")
    axes.set_title(f"{title}\nbox: 25–75 %, whiskers: 1–99 %", fontsize=10)
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _box(name: str, ms: Floats) -> dict[str, Any]:
    low, first, middle, third, high = np.percentile(ms, (1, 25, 50, 75, 99)).tolist()
    label = f"{name}\n{middle:,.2f} ms"
    return {"label": label, "whislo": low, "q1": first, "med": middle, "q3": third, "whishi": high}
