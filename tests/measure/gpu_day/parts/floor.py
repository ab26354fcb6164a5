"""A decode step against its floor: the time in which its bytes and FLOP pass at this device's own measured rates.

The floor is a model, labelled so: bytes of weights and of visible K and V at the rate of a copy, or FLOP at the rate of
a matrix product, whichever takes longer. Then the kernels on which a step's time goes, as the profiler counts them.
"""

import re
import statistics
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_worker.checkpoint.loading import weight_bytes
from gpu_worker.memory.costs import pool_tensors
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.recorded_plans import replay
from tests.measure.gpu_day.runners import Served, warm
from tests.measure.gpu_day.synthetic_plans import Generations, decode_plans
from tests.measure.gpu_day.timing import copy_rate, matmul_rate

_SIZES = {"max_rows": 256, "max_length": 4096, "token_budget": 1024, "num_pages": 4500}
_ROWS_AND_CONTEXTS = ((1, 600), (8, 600), (32, 600), (128, 600), (256, 600), (256, 1024), (128, 4000))
_STEPS = 40
_REPEATS = 3
_PROFILED = ((1, 600), (32, 600), (256, 600))
_PROFILED_STEPS, _MOST_KERNELS = 12, 24
# The profiler's times are in microseconds.
_MS = 1e3


def run(day: Day) -> None:
    """One table: rows and contexts."""
    device = torch.device(day.device)
    with day.phase("rates of the device"):
        bandwidth = statistics.median(copy_rate(device))
        matmul = statistics.median(matmul_rate(device, getattr(torch, day.dtype), size=256 if day.tiny else 8192))
    day.record.figure("copy", bandwidth / 1e9, "GB/s")
    day.record.figure("matrix product", matmul / 1e12, "TFLOP/s")
    served = warm(day, "Qwen3-0.6B", _SIZES)
    generations, rows = Generations(), list[list[float | int]]()
    for num_rows, context in ((2, 40), (4, 40)) if day.tiny else _ROWS_AND_CONTEXTS:
        with day.phase(f"{num_rows} rows of {context}"):
            device_ms, wall_ms = _step_ms(served, num_rows, context, generations)
        floor_ms = 1e3 * _floor_seconds(served, num_rows, context, bandwidth, matmul)
        share = 100 * floor_ms / device_ms if device_ms else 0.0
        rows.append([num_rows, context, device_ms, wall_ms, floor_ms, share])
        columns = ["rows", "context", "device ms", "wall ms", "floor ms (model)", "floor, % of device ms"]
        day.record.table("A decode step", columns, rows, Kind.MEASURED)
    for num_rows, context in ((2, 40),) if day.tiny else _PROFILED:
        with day.phase(f"profile of {num_rows} rows of {context}"):
            kernels = _kernels(served, num_rows, context, generations, on_cpu=day.on_cpu)
        title = f"Kernels of a decode step, {num_rows} rows of {context}, longest first"
        day.record.table(title, ["kernel", "launches", "ms"], kernels, Kind.MEASURED)


def _kernels(
    served: Served, rows: int, context: int, generations: Generations, *, on_cpu: bool
) -> list[list[str | float]]:
    """Launches and milliseconds per step of each kernel, by name without its numbers; their sum first."""
    plans = decode_plans(served.geometry, rows=rows, context=context, steps=_PROFILED_STEPS)
    with profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA]) as profiler:
        replay(served.runner, plans, generation=generations.next())
    launches, times = Counter[str](), Counter[str]()
    for event in profiler.key_averages():
        name = re.sub(r"\d+", "", event.key)[:90]
        launches[name] += event.count
        times[name] += event.self_cpu_time_total if on_cpu else event.self_device_time_total
    whole = [("all", launches.total(), times.total())]
    listed = [(name, launches[name], time) for name, time in times.most_common(_MOST_KERNELS)]
    return [[name, count / len(plans), time / len(plans) / _MS] for name, count, time in whole + listed]


def _step_ms(served: Served, rows: int, context: int, generations: Generations) -> tuple[float, float]:
    """Milliseconds of a step by the device's clock, and by the wall with two plans in flight: medians."""
    device_ms, wall_ms = list[float](), list[float]()
    for _ in range(_REPEATS):
        plans = decode_plans(served.geometry, rows=rows, context=context, steps=_STEPS)
        one = replay(served.runner, plans, generation=generations.next())
        # The first steps upload the rows' tokens.
        device_ms += [outcome.compute_us / 1e3 for outcome in one.outcomes[2:]]
        wall_ms.append(1e3 * one.seconds / len(plans))
    return statistics.median(device_ms), statistics.median(wall_ms)


def _floor_seconds(served: Served, rows: int, context: int, bandwidth: float, matmul: float) -> float:
    weights = weight_bytes(served.model)
    kv_per_token = sum(tensors.bytes_per_token for tensors in pool_tensors(served.layers, served.dtype))
    num_bytes = weights + rows * context * kv_per_token
    flops = 2 * (weights // served.dtype.itemsize) * rows
    return max(num_bytes / bandwidth, flops / matmul)
