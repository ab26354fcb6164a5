"""`tandem simulate --memory …`: runs sequences through four layouts of the KV cache. Owns queue, batch and preemption.

In a step, due sequences arrive, the queue's head is admitted while it fits, every running sequence gets a token, and
complete sequences are released. If a token finds no room, the youngest sequence is preempted to the head of the queue
and recomputed later. After a preemption no sequence is admitted until one has ended, because the preempted one would
otherwise be admitted and preempted in every step. Memory is recorded after the tokens and before the releases.
"""

import sys
import textwrap
from collections import abc, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.layouts import LAYOUTS, Layout, Sequence, Settings, draw
from tandem_contract.plural import counted
from tandem_contract.settings import Program
from tandem_contract.version import how_to_install

_OUTPUT = ["memory", "png"]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    client: int
    arrived: int
    length: int
    ran: bool = False


class Run:
    """One layout under the sequences of `clients`, which send their first ones at the steps of `arrivals`."""

    def __init__(self, layout: Layout, clients: list[list[Sequence]], arrivals: list[int]) -> None:
        self.layout = layout
        # For each step: slots used, reserved, free, in the largest hole, saved; sequences running; tokens of K/V read.
        self.rows: list[tuple[int, ...]] = []
        # The last step in which a sequence waited, or no client had sent its last sequence to its end.
        self.last_demand = 0
        # Steps between arrival and first admission, of each admitted sequence.
        self.waits: list[int] = []
        self.rejected = self.preemptions = 0
        # Tokens of sequences at their admission; of these, cached ones; those computed once more; generated ones.
        self.prefilled = self.hit = self.recomputed = self.decoded = 0
        self._left = [sequences[::-1] for sequences in clients]
        self._due = [(step, client) for client, step in enumerate(arrivals)]
        heapify(self._due)
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        # Whether a sequence was preempted and none has ended since; whether a client's last sequence has ended.
        self._is_full = self._is_ending = False

    def to_end(self) -> "Run":
        """Runs until the last sequence has ended."""
        while self._due or self._waiting or self._running:
            now = len(self.rows)
            while self._due and self._due[0][0] <= now:
                client = heappop(self._due)[1]
                sequence = self._left[client].pop()
                if sequence.length <= self.layout.longest:
                    self._waiting.append(_Entry(sequence, client, now, sequence.prompt))
                else:
                    self.rejected += 1
                    self._next(client, now)
            self._admit(now)
            for entry in self._grow():
                self.layout.release(entry.sequence)
                self._next(entry.client, now)
                self._is_full = False
        return self

    def _next(self, client: int, now: int) -> None:
        if self._left[client]:
            heappush(self._due, (now + 1, client))
        else:
            self._is_ending = True

    def _admit(self, now: int) -> None:
        while self._waiting and not (self._is_full and self._running):
            entry = self._waiting[0]
            hit = self.layout.admit(entry.sequence, entry.length)
            if hit is None:
                break
            self.prefilled += entry.length
            self.hit += hit
            if entry.ran:
                self.recomputed += entry.length - hit
            else:
                self.waits.append(now - entry.arrived)
            entry.ran = True
            self._running.append(self._waiting.popleft())

    def _grow(self) -> list[_Entry]:
        """Gives every running sequence a token and records the step. Returns the complete sequences."""
        layout, read, at = self.layout, 0, 0
        # The sequences behind `at` may be preempted in the loop.
        while at < len(self._running):
            entry = self._running[at]
            if not layout.grow(entry.sequence):
                # The youngest goes back to the head of the queue. It may be the one that needs the token.
                youngest = self._running.pop()
                layout.release(youngest.sequence)
                self._waiting.appendleft(youngest)
                self.preemptions += 1
                self._is_full = True
                continue
            entry.length += 1
            read += entry.length
            at += 1
        self.decoded += at
        if self._waiting or not self._is_ending:
            self.last_demand = len(self.rows)
        slots = (layout.used, layout.reserved, layout.free, layout.largest_hole(), layout.saved)
        self.rows.append((*slots, at, read))
        done = [entry for entry in self._running if entry.length == entry.sequence.length]
        if done:
            self._running = [entry for entry in self._running if entry.length < entry.sequence.length]
        return done


def count_that_fit(clients: list[list[Sequence]], layout: Layout) -> int:
    """Admits sequences at their full lengths, round by round, and returns how many fit before one finds no room."""
    every = (sequence for one_each in zip(*clients, strict=True) for sequence in one_each)
    fitting = (sequence for sequence in every if sequence.length <= layout.longest)
    return sum(1 for _ in takewhile(lambda item: layout.admit(item, item.length) is not None, fitting))


def percent(share: float) -> str:
    """Formats a share, in whole percent from 10 on."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def size(count: float) -> str:
    """Formats bytes in the unit that keeps the number below 1,024."""
    exponent = next(i for i in range(len(_UNITS)) if count < 1024 ** (i + 1) or i == len(_UNITS) - 1)
    return f"{count / 1024**exponent:,.{min(1, exponent)}f} {_UNITS[exponent]}"


def figures(run: Run, fits: int, token_bytes: int) -> dict[str, str]:
    """Returns the figures of a complete run. `fits` is the result of `count_that_fit`.

    Means cover the steps of full demand: in later ones memory is empty only because sequences are missing. Peaks and
    counts cover all steps. Internal fragmentation is the share of reserved slots that hold no token. External
    fragmentation is 1 − largest hole ÷ free, over the steps in which a slot was free.
    """
    used, reserved, free, hole, saved, running, read = np.array(run.rows).T
    layout, waits, demand = run.layout, np.array(run.waits or [0]), slice(0, run.last_demand + 1)
    broken = np.where(free > 0, 1 - hole / np.maximum(free, 1), 0.0)
    of_demand = broken[demand][free[demand] > 0]
    held = int(reserved[demand].sum())

    def mean(values: npt.NDArray[np.int64]) -> float:
        return float(values[demand].mean())

    def tokens(count: float) -> str:
        return f"{count:,.0f}  {size(count * token_bytes)}"

    return {
        "would fit at full length": f"{fits:,}",
        "running, mean / peak": f"{mean(running):,.1f} / {running.max():,}",
        "steps in all": f"{len(used):,}",
        "tokens per step": f"{run.decoded / len(used):,.1f}",
        "rejected / queued": f"{run.rejected:,} / {(waits > 0).sum():,}",
        "steps in the queue, mean / p99": f"{waits.mean():,.0f} / {np.percentile(waits, 99):,.0f}",
        "preemptions": f"{run.preemptions:,}",
        "tokens recomputed": f"{run.recomputed:,}",
        "used, mean": tokens(mean(used)),
        "used, peak": tokens(used.max()),
        "reserved, mean": tokens(mean(reserved)),
        "reserved and empty, mean": tokens(mean(reserved - used)),
        "free, mean": tokens(mean(free)),
        "utilisation, mean / peak": f"{percent(mean(used) / layout.total)} / {percent(used.max() / layout.total)}",
        "internal fragmentation": percent(1 - used[demand].sum() / held if held else 0),
        "external fragmentation, mean / peak": (
            f"{percent(of_demand.mean() if len(of_demand) else 0)} / {percent(broken.max())}"
        ),
        "no room though enough was free": f"{layout.refused_by_fragmentation:,}",
        "saved by sharing, mean": tokens(mean(saved)),
        "saved by sharing, peak": tokens(saved.max()),
        "cached tokens of those admitted": f"{run.hit:,} of {run.prefilled:,}",
        "copies": f"{layout.moves:,}",
        "tokens copied": tokens(layout.moved),
        "K/V read per step": size(int(read.sum()) * token_bytes / max(1, int((read > 0).sum()))),
    }


_DESCRIPTION = "Runs the same sequences through four layouts of the KV cache in one memory. --png draws them over time."


def run(program: str, arguments: abc.Sequence[str]) -> int:
    """Returns the exit code, 1 if the picture cannot be drawn or written. Raises SettingError."""
    names = [name for name in Settings.model_fields if name not in _OUTPUT]
    groups = {"output": _OUTPUT, "sequences and layouts": names}
    options = Program(command=program, model=Settings, description=_DESCRIPTION, groups=groups).read(arguments, {})
    if options.png is not None:
        # Checked before the run, which may be long.
        if not options.png.parent.is_dir():
            return _fail(f"--png {options.png}: there is no folder {options.png.parent}")
        try:
            import matplotlib.figure  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ModuleNotFoundError as error:
            return _fail(f"{error.name} is missing: install it with: {how_to_install('plot')}")
    clients, arrivals = draw(options)
    chosen = LAYOUTS if options.memory == "all" else {options.memory: LAYOUTS[options.memory]}
    runs = {name: Run(layout(options), clients, arrivals).to_end() for name, layout in chosen.items()}
    fits = {name: count_that_fit(clients, layout(options)) for name, layout in chosen.items()}
    token = options.token_bytes
    columns = [{"memory layout": name, **figures(run, fits[name], token)} for name, run in runs.items()]
    lines = [f"{label:36}" + "".join(f"{column[label]:>23}" for column in columns) for label in columns[0]]
    asked = ", ".join(f"{name} {value}" for name, value in options.model_dump(exclude=set(_OUTPUT)).items())
    # Lines that a page is wide enough for.
    memory = f"{size(options.memory_tokens * token)} of K/V, {size(token)} per token"
    heading = textwrap.wrap(f"{memory}; {asked}", 120)
    print("\n".join([*heading, "", *lines]))
    if options.png is not None:
        try:
            draw_picture(options.png, heading, runs)
        except OSError as error:
            # An error of write() carries no file name.
            return _fail(f"{error.filename or options.png}: {error.strerror}")
        print(options.png)
    return 0


def _fail(words: str) -> int:
    print(f"error: {words}", file=sys.stderr)
    return 1


# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = {"contiguous": "#D55E00", "growing": "#E69F00", "paged": "#56B4E9", "shared": "#009E73"}


def draw_picture(path: Path, heading: list[str], runs: dict[str, Run]) -> Any:
    """Draws one strip per layout, over the same steps; returns the Figure. Raises OSError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    # matplotlib types its keyword arguments as unknown.
    figure: Any = Figure(figsize=(10.0, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    strips = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(strips, runs.items(), strict=True):
        rows, total = np.array(run.rows), run.layout.total
        x, used, reserved = np.arange(len(rows)), *(100 * rows[:, :2].T / total)
        axes.fill_between(x, used, color=_COLOURS[name], linewidth=0, label="used")
        axes.fill_between(x, used, reserved, color=_COLOURS[name], alpha=0.3, linewidth=0, label="reserved and empty")
        mean = percent(rows[: run.last_demand + 1, 0].mean() / total)
        axes.set_title(f"{name}: {mean} used, {counted(len(rows), 'step')} in all", fontsize=10, loc="left")
        axes.set(ylim=(0, 104), yticks=range(0, 101, 25), ylabel="% of the memory")
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False, borderaxespad=0.1)
    strips[-1].set(xlim=0, xlabel="step (one token for every running sequence)")
    strips[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.suptitle("\n".join(heading), fontsize=8.5, x=0.01, ha="left")
    figure.savefig(path, format="png")
    return figure
