"""Measures linear layers on a CPU against their limit and their peers: `python -m tests.measure.linears`.

The limit is the larger of two times: reading W, x and y at the bandwidth of memory, and the multiply-adds at the rate
of the cores; both are measured in the same run. Every layer has copies that exceed the caches, as the layers of a model
do. Owns the rounds, the bars and the report.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.attention.kv_cache import huge_zeros
from gpu_worker.checkpoint.linear import LinearKernel, linear_kernel
from tests.measure.harness import Bar, Measurement, in_turns
from tests.measure.limits import multiply_rate, read_bandwidth
from tests.measure.serving.roofline import linear_shapes
from tests.measure.workload import MODEL

# The benchmarks' model, with merged layers: (input features, output features), and how many of them a step has.
MODEL_SHAPES = dict.fromkeys(linear_shapes(), MODEL["num_hidden_layers"])
MODEL_SHAPES[MODEL["hidden_size"], MODEL["vocab_size"]] = 1
LARGER_SHAPES = {(2048, 2048): 1, (2048, 8192): 1}
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 512), (1, 32)
_COPIES_BYTES = 80 << 20
_ROUND_SECONDS = 0.006
# Of the limit with few rows, where W is read only once; and of oneDNN's rate with any number of rows.
FEW_ROWS, FEW_BAR, ONEDNN_BAR = 4, 0.85, 0.95

Call = Callable[[Tensor, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One layer's median times in microseconds; `share` is the limit's time divided by the kernel's."""

    dtype: str
    threads: int
    in_features: int
    out_features: int
    layers: int
    rows: int
    native_us: float
    onednn_us: float
    torch_us: float
    limit_us: float

    @property
    def share(self) -> float:
        """How much of the limit the kernel reaches."""
        return self.limit_us / self.native_us

    def gflops(self, microseconds: float) -> float:
        """10^9 floating-point operations per second."""
        return 2 * self.rows * self.in_features * self.out_features / microseconds / 1e3


def engines(kernel: LinearKernel, weight: Tensor, copies: int) -> dict[str, Call]:
    """A call of each engine with input and number of the copy."""
    num_bytes = kernel.packed_bytes(weight)
    memory = huge_zeros((copies * num_bytes,), torch.uint8).split(num_bytes)
    native = [kernel.pack(weight, part.view(weight.dtype)) for part in memory]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight.clone()) for _ in range(copies)]
    plain = [weight.clone() for _ in range(copies)]
    return {
        "native": lambda x, i: kernel.multiply(x, native[i], None, weight.shape[0]),
        "onednn": lambda x, i: torch.ops.mkldnn._linear_pointwise(x, onednn[i], None, "none", [], ""),
        "torch": lambda x, i: nn.functional.linear(x, plain[i]),
    }


def median_times(calls: dict[str, Call], x: Tensor, copies: int, rounds: int) -> dict[str, float]:
    """Seconds of a call of each engine; they take turns."""
    numbers = itertools.cycle(range(copies))

    def seconds(call: Call) -> float:
        call(x, next(numbers))
        count, begun, spent = 0, time.perf_counter(), 0.0
        while spent < _ROUND_SECONDS or not count:
            call(x, next(numbers))
            count, spent = count + 1, time.perf_counter() - begun
        return spent / count

    times = in_turns(rounds, {name: partial(seconds, call) for name, call in calls.items()})
    return {name: median(each) for name, each in times.items()}


@torch.inference_mode()
def measure(
    dtype: torch.dtype, threads: int, shapes: dict[tuple[int, int], int], row_counts: Iterable[int], rounds: int
) -> Iterator[Figures]:
    """The figures of every layer and number of rows, with this number of threads."""
    kernel = linear_kernel(dtype)
    if kernel is None:
        raise SystemExit(f"the C++ kernel for {dtype} is not built on this machine")
    torch.set_num_threads(threads)
    bandwidth, rate = read_bandwidth(threads), multiply_rate(dtype, threads)
    for (num_in, num_out), layers in shapes.items():
        weight = torch.randn(num_out, num_in).to(dtype)
        copies = max(1, -(-_COPIES_BYTES // weight.nbytes))
        calls = engines(kernel, weight, copies)
        for rows in row_counts:
            x = torch.randn(rows, num_in).to(dtype)
            took = median_times(calls, x, copies, rounds)
            num_bytes = weight.nbytes + x.nbytes + rows * num_out * dtype.itemsize
            limit = max(num_bytes / bandwidth, 2 * rows * num_in * num_out / rate)
            yield Figures(
                dtype=str(dtype).removeprefix("torch."),
                threads=threads,
                in_features=num_in,
                out_features=num_out,
                layers=layers,
                rows=rows,
                **{f"{name}_us": seconds * 1e6 for name, seconds in (took | {"limit": limit}).items()},
            )


def steps(found: Sequence[Figures]) -> list[Figures]:
    """The layers of a step of the benchmarks' model together, by dtype, threads and rows."""
    groups: dict[tuple[str, int, int], list[Figures]] = {}
    for each in found:
        if (each.in_features, each.out_features) in MODEL_SHAPES:
            groups.setdefault((each.dtype, each.threads, each.rows), []).append(each)
    sums = []
    for (dtype, threads, rows), group in groups.items():
        times = {
            name: sum(getattr(each, name) * each.layers for each in group)
            for name in ("native_us", "onednn_us", "torch_us", "limit_us")
        }
        # One layer of as many weights.
        weights = sum(each.in_features * each.out_features * each.layers for each in group)
        sums.append(
            Figures(dtype=dtype, threads=threads, in_features=1, out_features=weights, layers=1, rows=rows, **times)
        )
    return sums


def bars(step: Figures) -> Iterator[Bar]:
    name = f"{step.dtype}, {step.threads} threads, {step.rows} rows"
    if step.rows <= FEW_ROWS:
        yield Bar(name=f"share of the limit, {name}", value=step.share, limit=FEW_BAR, is_floor=True)
    rate = step.onednn_us / step.native_us
    yield Bar(name=f"share of oneDNN's rate, {name}", value=rate, limit=ONEDNN_BAR, is_floor=True)


def row(each: Figures) -> dict[str, Any]:
    """With rates: 10^9 operations per second of each engine, 10^9 bytes of W per second, and the share of the limit."""
    found, num_bytes = asdict(each), each.in_features * each.out_features * getattr(torch, each.dtype).itemsize
    found |= {f"{name}_gflops": each.gflops(found[f"{name}_us"]) for name in ("native", "onednn", "torch")}
    return found | {"gb_per_s": num_bytes / each.native_us / 1e3, "share": each.share}


def main(argv: Sequence[str] | None = None) -> int:
    measurement = Measurement("linears")
    measurement.flag("--quick", action="store_true", help="the model's layers, two numbers of rows, two rounds")
    measurement.flag("--rows", type=int, nargs="+")
    measurement.flag("--dtypes", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    measurement.flag("--threads", type=int, nargs="+", default=[1, 2])
    measurement.flag("--rounds", type=int, default=3)
    args = measurement.begin(argv)
    row_counts = args.rows or (QUICK_ROWS if args.quick else ROWS)
    shapes = MODEL_SHAPES if args.quick else MODEL_SHAPES | LARGER_SHAPES
    if min(*row_counts, *args.threads, args.rounds, 1) < 1 or max(args.threads) > (os.cpu_count() or 1):
        most = os.cpu_count()
        measurement.parser.error(f"--rows, --rounds and --threads must be at least 1, and --threads at most {most}")
    found: list[Figures] = []
    for threads in args.threads:
        for dtype in args.dtypes:
            own: list[Figures] = []
            for each in measure(getattr(torch, dtype), threads, shapes, row_counts, args.rounds):
                own.append(each)
                measurement.row(row(each))
            for step in steps(own):
                measurement.row(row(step))
            found += own
            rate, bandwidth = multiply_rate(getattr(torch, dtype), threads), read_bandwidth(threads)
            measurement.note(f"{dtype}, {threads} threads: {rate / 1e9:.0f} GFLOP/s, reads {bandwidth / 1e9:.1f} GB/s")
    measurement.bar(*(bar for step in steps(found) for bar in bars(step)))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
