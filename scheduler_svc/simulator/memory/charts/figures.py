"""The figures of a run. Owns their definitions, not their display.

Means cover the steps of full demand: those up to the last one in which a sequence waited or every client still had a
request. In later steps memory is empty only because sequences are missing. Peaks and counts cover all steps. Internal
fragmentation is the share of reserved slots that hold no token. External fragmentation is 1 − largest hole ÷ free,
over the steps in which a slot was free.
"""

from array import array
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.layouts.layout import Layout
from scheduler_svc.simulator.memory.run import Record

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Measured microseconds of one kind of call into a layout, which depend on Python and the machine."""

    calls: int
    median_us: float
    p99_us: float


class Figures(SimpleNamespace):
    """The figures of one layout, with the names that `figures` gives them."""

    def as_json(self) -> dict[str, object]:
        """Returns the figures with a `…_bytes` behind every `…_tokens`."""
        values: dict[str, object] = {}
        for name, value in vars(self).items():
            values[name] = asdict(value) if isinstance(value, Spread) else value
            if name.endswith("_tokens"):
                values[name.removesuffix("_tokens") + "_bytes"] = value * self.token_bytes
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One layout's run and its figures."""

    record: Record
    figures: Figures


def figures(record: Record, layout: Layout, fits: int, geometry: Geometry) -> Figures:
    """Returns the figures of a complete run. `fits` is the result of `count_that_fit`."""
    steps, size = record.steps, geometry.token_bytes
    demand = slice(0, record.last_demand + 1)
    used, reserved, free = steps["used"], steps["reserved"], steps["free"]
    saved, running, waits = steps["saved"], steps["running"], _ints(record.waits)
    wasted = reserved - used
    broken = external(free, steps["largest_hole"])
    had_free = free > 0
    read_full, read = int(steps["read_full"].sum()), int(steps["read"].sum())
    decoding = max(1, int((steps["read_full"] > 0).sum()))
    return Figures(
        memory=layout.name,
        geometry=geometry.model.name,
        token_bytes=size,
        total_tokens=layout.total,
        overhead_tokens=layout.overhead,
        steps=len(used),
        demand_steps=len(used[demand]),
        sequences=record.finished,
        rejected=record.rejected,
        delayed=int((waits > 0).sum()),
        wait_mean_steps=_mean(waits),
        wait_p99_steps=float(np.percentile(waits, 99)) if len(waits) else 0.0,
        preemptions=record.preemptions,
        recomputed_tokens=record.recomputed,
        fit_sequences=fits,
        running_mean=_mean(running[demand]),
        running_peak=int(running.max()),
        used_mean_tokens=_mean(used[demand]),
        used_peak_tokens=int(used.max()),
        reserved_mean_tokens=_mean(reserved[demand]),
        reserved_peak_tokens=int(reserved.max()),
        wasted_mean_tokens=_mean(wasted[demand]),
        wasted_peak_tokens=int(wasted.max()),
        free_mean_tokens=_mean(free[demand]),
        utilisation_mean=_mean(used[demand]) / layout.total,
        utilisation_peak=int(used.max()) / layout.total,
        internal_fragmentation=_share(int(wasted[demand].sum()), int(reserved[demand].sum())),
        external_fragmentation=_mean(broken[demand][had_free[demand]]),
        external_fragmentation_peak=float(broken.max()),
        refused_by_fragmentation=layout.refused_by_fragmentation,
        saved_mean_tokens=_mean(saved[demand]),
        saved_peak_tokens=int(saved.max()),
        cached_mean_tokens=_mean(steps["cached"][demand]),
        prefill_tokens=record.prefilled,
        hit_tokens=record.hit,
        moves=layout.moves,
        moved_tokens=layout.moved,
        decoded_tokens=record.decoded,
        decoded_per_step=record.decoded / len(used),
        read_full_per_token_bytes=_share(read_full, record.decoded) * size,
        read_per_token_bytes=_share(read, record.decoded) * size,
        read_full_per_step_bytes=read_full * size / decoding,
        read_per_step_bytes=read * size / decoding,
        read_saved=1 - _share(read, read_full) if read_full else 0.0,
        prepare=_spread(record.prepare_ns),
        allocate=_spread(record.admit_ns),
        grow=_spread(record.grow_ns),
    )


def external(free: Ints, largest: Ints) -> npt.NDArray[np.float64]:
    """Returns 1 − largest hole ÷ free, 0 if no slot is free."""
    return np.where(free > 0, 1 - largest / np.maximum(free, 1), 0.0)


def _ints(values: "array[int]") -> Ints:
    return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _spread(nanoseconds: "array[int]") -> Spread:
    if not nanoseconds:
        return Spread(calls=0, median_us=0.0, p99_us=0.0)
    median, p99 = np.percentile(_ints(nanoseconds), (50, 99)).tolist()
    return Spread(calls=len(nanoseconds), median_us=median / 1e3, p99_us=p99 / 1e3)
