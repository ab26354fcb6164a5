"""The number of CPU threads of an operation: by a setting, or by a measurement of the model's linear layers.

Owns the candidates, the measurement, the choice, and the file for standby workers. A token's bits do not depend
on the number. Knows nothing of models but their linear layers.
"""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_worker.process.machine import Cpus, usable_cpus
from gpu_worker.settings import WorkerSettings
from tandem_contract import private_file
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

# What scheduler, front end and clients add to the linear layers of a step of one row and of 32 if every CPU has a
# thread of the worker, because one thread then holds back the others. A whole step has twice as much: 32 tokens take
# the service some 6 ms of CPU. Measured on two cores, two threads against one: layers of 18 ms, 32 rows, 837 against
# 624 tokens/s, 8 rows some 400 against 500, one row 124 against 127; layers of 2.6 ms, 8 rows, 1,160 against 1,680.
_SERVICE_OF_ONE_ROW, _SERVICE_OF_MANY_ROWS = 0.0005, 0.003
# The fewest threads within this share of the fastest: the others would spin, and take cores from other processes.
_GOOD_ENOUGH = 0.95
_MANY_ROWS = 32
# Weights that a measurement reads: with one row more than most caches hold, with many rows some milliseconds of work.
_ONE_ROW_BYTES, _MANY_ROWS_BYTES = 64 << 20, 12 << 20
_REPEATS = 4
_MOST_SECONDS = 0.2
_FILE = "worker.threads"


class Linear(Protocol):
    """A linear layer with packed weights."""

    in_features: int
    num_bytes: int
    dtype: torch.dtype

    def __call__(self, x: Tensor, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The seconds of a model's linear layers with a number of threads: with one row, and with 32."""

    threads: int
    one_row: float
    many_rows: float


def set_threads(threads: int | None) -> None:
    """Sets the threads of one operation; operations run one at a time. None: what `default_threads` says."""
    torch.set_num_threads(threads or default_threads())
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def default_threads() -> int:
    """The number where nothing is measured: all physical cores but one, within OMP_NUM_THREADS.

    Operators with a thread on every core wait for threads that are not scheduled: a step of 14 ms took 200 beside a
    busy client.
    """
    return max(1, min(_cores_by_quota(usable_cpus()) - 1, _openmp_limit()))


def choose_or_follow(linears: Sequence[Linear], settings: WorkerSettings, model: str) -> None:
    """Sets the number of threads: that of the serving worker if this one is on standby, else by measurement.

    The first worker writes its number to `worker.threads` in the runtime folder, with what it depends on. model: the
    model and its dtype.
    """
    file, about = settings.runtime_dir / _FILE, f"{model} on {usable_cpus()}"
    if settings.standby and (threads := _read(file, about)) is not None:
        torch.set_num_threads(threads)
        log.info("threads: %d, as the serving worker measured", threads)
        return
    choose_threads(linears)
    if not settings.standby:
        # Without a folder that it may write, there is no file. No reader sees a part of one.
        with contextlib.suppress(OSError):
            private_file.put(file, f"{torch.get_num_threads()} {about}\n".encode())


def choose_threads(linears: Sequence[Linear]) -> None:
    """Measures layers with each candidate, sets the best number, and logs the figures. Without layers, changes nothing.

    Takes some tens of milliseconds; large layers take longer, and after `_MOST_SECONDS` no candidate is begun.
    """
    cpus = usable_cpus()
    counts = candidates(cpus, _openmp_limit())
    if len(counts) == 1 or not linears:
        log.info("threads: %d; %s", torch.get_num_threads(), _described(cpus))
        return
    measured: list[Measured] = []
    begun = time.perf_counter()
    for threads in counts:
        if measured and time.perf_counter() - begun > _MOST_SECONDS:
            break
        torch.set_num_threads(threads)
        one_row = _seconds(linears, 1, _ONE_ROW_BYTES)
        many_rows = _seconds(linears, _MANY_ROWS, _MANY_ROWS_BYTES)
        measured.append(Measured(threads=threads, one_row=one_row, many_rows=many_rows))
    choice = best(measured, cpus)
    torch.set_num_threads(choice)
    log.info(
        "threads: %d; %s; %s with 1 and %d rows: %s; measured in %.0f ms",
        choice,
        _described(cpus),
        numbered(len(linears), "linear layer"),
        _MANY_ROWS,
        ", ".join(f"{one.one_row * 1e3:.2f} and {one.many_rows * 1e3:.2f} ms by {one.threads}" for one in measured),
        (time.perf_counter() - begun) * 1e3,
    )


def candidates(cpus: Cpus, limit: int) -> list[int]:
    """Powers of two, and a thread for every physical core or for every one but one; within the quota and `limit`.

    Siblings of a core share its arithmetic, so a second thread on it gains nothing.
    """
    cores = _cores_by_quota(cpus)
    powers = (1 << i for i in range(cores.bit_length()))
    return sorted({min(number, limit) for number in (*powers, cores - 1, cores) if number >= 1})


def best(candidates: Sequence[Measured], cpus: Cpus) -> int:
    """The fewest threads that are almost as fast as the fastest, in both kinds of step together.

    The geometric mean weighs a step of one row and one of many the same. A thread on every CPU that this process may
    use leaves the scheduler no room, and costs what it takes.
    """
    full = int(min(cpus.logical, cpus.quota or cpus.logical))

    def cost(item: Measured) -> float:
        if item.threads < full or full == 1:
            return (item.one_row * item.many_rows) ** 0.5
        return ((item.one_row + _SERVICE_OF_ONE_ROW) * (item.many_rows + _SERVICE_OF_MANY_ROWS)) ** 0.5

    least = min(map(cost, candidates))
    return min(item.threads for item in candidates if cost(item) * _GOOD_ENOUGH <= least)


def _read(file: Path, about: str) -> int | None:
    try:
        number, _, described = file.read_text().strip().partition(" ")
    except (OSError, ValueError):
        return None
    if described != about or not number.isdecimal() or not 1 <= int(number) <= usable_cpus().logical:
        return None
    return int(number)


def _cores_by_quota(cpus: Cpus) -> int:
    return max(1, min(cpus.cores, int(cpus.quota or cpus.cores)))


def _openmp_limit() -> int:
    """OMP_NUM_THREADS, by which users limit all OpenMP programs; torch has read it too."""
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(value)) if value.isdigit() else 1 << 30


def _described(cpus: Cpus) -> str:
    quota = "" if cpus.quota is None else f", quota {cpus.quota:g}"
    return f"{cpus.logical} CPUs on {numbered(cpus.cores, 'core')}{quota}"


@torch.inference_mode()
def _seconds(linears: Sequence[Linear], rows: int, num_bytes: int) -> float:
    """The time of all layers, from the least of several passes over the first layers with `num_bytes` of weights."""
    before = accumulate((layer.num_bytes for layer in linears), initial=0)
    chosen = [layer for layer, read in zip(linears, before, strict=False) if read < num_bytes]
    shapes = {(layer.in_features, layer.dtype) for layer in chosen}
    inputs = {shape: torch.ones(rows, shape[0], dtype=shape[1]) for shape in shapes}
    calls = [(layer, inputs[layer.in_features, layer.dtype]) for layer in chosen]
    times: list[float] = []
    # The first pass starts the threads and does not count.
    for _ in range(1 + _REPEATS):
        begun = time.perf_counter()
        for layer, x in calls:
            layer(x)
        times.append(time.perf_counter() - begun)
    share = sum(layer.num_bytes for layer in chosen) / sum(layer.num_bytes for layer in linears)
    return min(times[1:]) / share
