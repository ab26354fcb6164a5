"""Step logs as the service writes them, and the values that the plot draws of them."""

import functools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tandem_client.plot.chart import figure_of
from tandem_client.plot.data import read_steps, summarize

# tests/system/test_steps.py checks that the service writes the same.
HEADER = (
    "step,at_seconds,kind,cause,running,waiting,tokens,prefill_tokens,decode_tokens,output_tokens,"
    "pages_used,pages_cached,pages_total,preemptions,lane,generation,ms,span_ms,"
    "workers,all_running,all_pages_used,all_pages_cached,all_pages_total"
)
# Two prompts, a worker's death in the middle, an idle second before the last request.
LINES = (
    "0,1.000000,joined,,0,0,0,0,0,0,0,0,20,0,1,1,0.000,0.000,1,0,0,0,20",
    "1,1.100000,prefill,,1,1,64,64,0,1,4,0,20,0,1,1,80.000,100.000,1,1,4,0,20",
    "2,1.200000,mixed,,2,0,33,32,1,2,6,1,20,0,1,1,60.000,150.000,1,2,6,1,20",
    "3,1.250000,decode,,2,0,2,0,2,2,10,3,20,1,1,1,20.000,90.000,1,2,10,3,20",
    "3,1.300000,reset,worker lost,0,2,4,0,4,0,0,0,20,1,1,2,0.000,60.000,0,0,0,0,0",
    "3,3.300000,joined,,0,2,0,0,0,0,0,0,20,1,2,3,0.000,0.000,1,0,0,0,20",
    "4,3.400000,prefill,,2,0,102,102,0,2,7,2,20,1,2,3,90.000,100.000,1,2,7,2,20",
    "5,3.440000,decode,,2,0,2,0,2,2,7,5,20,1,2,3,20.000,130.000,1,2,7,5,20",
    "6,4.500000,decode,,1,0,1,0,1,1,1,9,20,1,2,3,10.000,40.000,1,1,1,9,20",
)
# Two workers; the second falls idle and dies, and comes back as a third lane while the first waits for work.
LANES = (
    "0,1.000000,joined,,0,0,0,0,0,0,0,0,20,0,1,1,0.000,0.000,1,0,0,0,20",
    "0,1.050000,joined,,0,0,0,0,0,0,0,0,40,0,2,2,0.000,0.000,2,0,0,0,60",
    "1,1.100000,prefill,,1,3,64,64,0,1,4,0,20,0,1,1,45.000,45.000,2,1,4,0,60",
    "2,1.200000,decode,,2,0,2,0,2,2,8,2,40,0,2,2,40.000,60.000,2,3,12,2,60",
    "3,1.250000,decode,,1,0,1,0,1,1,4,0,20,0,1,1,20.000,150.000,2,3,12,2,60",
    "4,1.300000,decode,,2,0,2,0,2,2,8,4,40,0,2,2,60.000,100.000,2,3,12,4,60",
    "5,1.400000,decode,,1,0,1,0,1,1,4,1,20,0,1,1,20.000,150.000,2,1,4,13,60",
    "5,1.500000,reset,worker lost,0,0,0,0,0,0,0,0,40,0,2,3,0.000,0.000,1,1,4,1,20",
    "6,1.600000,decode,,1,2,1,0,1,1,6,1,20,0,1,1,20.000,200.000,1,1,6,1,20",
    "6,1.700000,joined,,0,2,0,0,0,0,0,0,40,0,3,4,0.000,0.000,2,0,0,7,60",
    "7,1.800000,prefill,,3,0,90,90,0,3,10,0,40,0,3,4,70.000,80.000,2,4,15,2,60",
    "8,1.900000,decode,,1,0,1,0,1,1,5,2,20,0,1,1,20.000,120.000,2,1,5,12,60",
)


def written(path: Path, lines: Iterable[str] = LINES, *, header: str = HEADER, end: str = "\n") -> Path:
    path.write_text("\n".join([header, *lines]) + end)
    return path


def decode_steps(
    count: int, *, running: int = 5, ms: int = 8, odd: int = 0, odd_running: int = 0, odd_ms: int = 0
) -> tuple[str, ...]:
    """Steps of 8 ms, one each 10 ms; every tenth is mixed. Step `odd` has values of its own."""
    return tuple(
        f"{i},{i / 100:.6f},{'decode' if i % 10 else 'mixed'},,1,0,5,0,5,5,9,1,20,0,1,1,"
        f"{odd_ms if i == odd else ms}.000,9.000,1,{odd_running if i == odd else running},9,1,20"
        for i in range(1, count + 1)
    )


@functools.cache
def figure(lines: Sequence[str] = LINES, *, by_time: bool = False, name: str = "steps.csv") -> Figure:
    """The picture of a file of these lines. It is drawn once for all tests, and not onto a canvas."""
    with tempfile.TemporaryDirectory() as folder:
        log = read_steps(written(Path(folder) / name, lines))
    return figure_of(log, summarize(log), by_time=by_time)


def panels(drawn: Figure) -> dict[str, Axes]:
    return dict(zip(("requests", "kinds", "rates", "pages", "times", "shares", "spread"), drawn.axes, strict=True))


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    [found] = [one for one in axes.lines if one.get_label() == label]
    return [(round(float(x), 6), round(float(y), 6)) for x, y in zip(*found.get_data(), strict=True)]
