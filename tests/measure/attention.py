"""Measures decode attention on a CPU against its roofline: `python -m tests.measure.attention`.

The roofline (tests/measure/README.md) is measured in the same run, with as many threads. A call is the whole attention
operator of one layer: it writes the step's keys and values too. Owns the cases, the rounds, the bar and the report.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf
from typing import Any

import torch

from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, AttentionLayer, AttentionPattern, LayerMap
from gpu_worker.attention.paged import StepContext
from gpu_worker.cpu.steps import CpuKernels
from gpu_worker.geometry import Geometry
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.step_layout import lay_out
from gpu_worker.step.device_model import DeviceTables
from gpu_worker.trees import mapped
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker.plans import TinyCore
from tests.measure.harness import Bar, Measurement, in_turns, spread
from tests.measure.limits import least_seconds, read_bandwidth
from tests.rigs.padded_shapes import unpadded

BAR = 0.6
KV_HEADS, DIM = 4, 64
PAGES, GROUPS, CONTEXTS, DTYPES = (16, 64, 128), (1, 2, 4, 8), (190, 4096), ("float32", "bfloat16")
# What the layers of one call read together at least: three times the level 3 cache.
_LEAST_BYTES = 96 << 20
_ROUNDS, _QUICK_ROUNDS = 15, 5
_GEMM_ROWS, _GEMM_DIM = 512, 1024
# By name: the changes of a kind that sees everything, with `window` as a part of the context.
VISIBILITIES: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 0.5},
    "window and sink tokens": {"window": 0.5, "sink_tokens": 5},
    "learned sinks": {"has_learned_sinks": True},
    "soft-capping": {"softcap": 50.0},
    "keys of 192, values of 128": {"key_dim": 192, "value_dim": 128},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape of decode attention."""

    dtype: str
    page_size: int
    group: int
    context: int
    visibility: str = "all"

    @property
    def kind(self) -> AttentionKind:
        own = dict(VISIBILITIES[self.visibility])
        dims = {"key_dim": own.pop("key_dim", DIM), "value_dim": own.pop("value_dim", DIM)}
        window = own.pop("window", None)
        return AttentionKind(
            num_heads=KV_HEADS * self.group,
            num_kv_heads=KV_HEADS,
            scale=DIM**-0.5,
            softcap=own.pop("softcap", None),
            pattern=AttentionPattern(window=None if window is None else int(window * self.context), **own),
            **dims,
        )

    @property
    def rows(self) -> int:
        """As many rows as keep the pool of a layer small."""
        return 32 if self.context < 1000 else 4

    @property
    def seen(self) -> int:
        """Positions that the queries of all rows see."""
        pattern = self.kind.pattern
        window = self.context if pattern.window is None else pattern.window + pattern.sink_tokens
        return self.rows * min(window, self.context)

    @property
    def num_bytes(self) -> int:
        """Bytes of the visible keys and values of one layer."""
        kind = self.kind
        itemsize = getattr(torch, self.dtype).itemsize
        return self.seen * kind.num_kv_heads * (kind.key_dim + kind.value_dim) * itemsize

    @property
    def operations(self) -> int:
        """Floating-point operations of both products of one layer."""
        kind = self.kind
        return 2 * self.seen * kind.num_heads * (kind.key_dim + kind.value_dim)


@cache
def gemm_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large product with prepacked weights, the best of several."""
    x, weight = torch.randn(_GEMM_ROWS, _GEMM_DIM).to(dtype), torch.randn(_GEMM_DIM, _GEMM_DIM).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    least = least_seconds(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), 10)
    return 2 * _GEMM_ROWS * _GEMM_DIM**2 / least


class Step:
    """A decode step over layers of one kind, in pools of noise with pages in random order."""

    def __init__(self, case: Case, *, native: bool) -> None:
        num_layers, kind = -(-_LEAST_BYTES // case.num_bytes), case.kind
        self.layers = LayerMap(layers=tuple(AttentionLayer(name=str(i), kind=kind) for i in range(num_layers)))
        per_row = -(-case.context // case.page_size)
        geometry = Geometry(
            page_size=case.page_size,
            num_pages=case.rows * per_row + 1,
            max_rows=case.rows,
            max_length=per_row * case.page_size,
            token_budget=case.rows + 64,
            chunk_align=64,
            vocab_size=9,
        )
        device, dtype = torch.device("cpu"), getattr(torch, case.dtype)
        on_device = DeviceTables(geometry, device)
        self.cache = KvCache(
            self.layers, num_pages=geometry.num_pages, page_size=case.page_size, dtype=dtype, device=device
        )
        noise = torch.randn(1 << 16).to(dtype)
        for head in (head for pool in self.cache.pools for head in pool):
            # The page of learned sinks stays zero.
            for part in head[: geometry.num_pages * case.page_size].view(-1).split(noise.numel()):
                part.copy_(noise[: part.numel()])
        kernels = CpuKernels(self.layers, geometry, on_device.pages, dtype, native=native)
        order = (torch.randperm(geometry.num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
        core, tables = TinyCore(geometry, page_order=order), RowTables(geometry)
        for row in range(1, case.rows + 1):
            core.add(row, [0] * case.context).position = case.context - 1
        plan = read_plan(core.plan(chunks={}, decode=list(core.rows)), geometry)
        edits = tables.apply(plan)
        layout = mapped(lay_out(plan, edits, tables, (), unpadded(geometry)), torch.from_numpy)
        on_device.set_pages(layout.inputs.edits if layout.has_static_edits else layout.extras.edits)
        self.layout = layout
        self.context: StepContext = kernels.context(layout.inputs)
        # As the model leaves them: heads before tokens, dimensions of a token side by side.
        self.query, self.key, self.value = (
            torch.randn(1, case.rows, heads, dim).to(dtype).transpose(1, 2)
            for heads, dim in (
                (kind.num_heads, kind.key_dim),
                (KV_HEADS, kind.key_dim),
                (KV_HEADS, kind.value_dim),
            )
        )
        self.sinks = torch.randn(kind.num_heads).to(dtype) if kind.pattern.has_learned_sinks else None

    def run(self) -> float:
        """Computes every layer once; returns seconds per layer."""
        begun = time.perf_counter()
        for keys, values in zip(self.cache.keys, self.cache.values, strict=True):
            torch.ops.tandem.attend(self.query, self.key, self.value, self.sinks, keys, values, self.context.number, 0)
        return (time.perf_counter() - begun) / len(self.layers.layers)


@torch.inference_mode()
def measure(case: Case, kernels: Sequence[str], threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The figures of each kernel, in turns. `share` is the roofline's time divided by the median, `bound` says which of
    the two it is."""
    # The first round compiles, or loads pages.
    times = in_turns(rounds, {name: Step(case, native=name == "native").run for name in kernels}, warm=1)
    reading = case.num_bytes / read_bandwidth(threads)
    computing = case.operations / gemm_rate(getattr(torch, case.dtype))
    for name, own in times.items():
        took = spread(own)
        yield {
            **asdict(case),
            "kernel": name,
            "us_per_layer": {which: 1e6 * seconds for which, seconds in took.items()},
            "GB/s": case.num_bytes / took["median"] / 1e9,
            "share": max(reading, computing) / took["median"],
            "bound": "reading" if reading > computing else "products",
        }


def all_cases(dtypes: Sequence[str], *, quick: bool) -> Iterator[tuple[Case, bool]]:
    """Each case, and whether torch's operators are measured too by default."""
    for dtype in dtypes:
        for context in CONTEXTS:
            for page_size in PAGES[-1:] if quick else PAGES:
                for group in GROUPS:
                    case = Case(dtype=dtype, page_size=page_size, group=group, context=context)
                    yield case, (page_size, group, context) == (PAGES[-1], 2, CONTEXTS[0])
            for visibility in VISIBILITIES:
                for group in () if visibility == "all" else (2, 4):
                    case = Case(dtype=dtype, page_size=PAGES[-1], group=group, context=context)
                    yield replace(case, visibility=visibility), False


def main(argv: Sequence[str] | None = None) -> int:
    measurement = Measurement("attention")
    measurement.flag("--quick", action="store_true", help="one page size, five rounds")
    measurement.flag("--torch", choices=("some", "all", "none"), default="some", help="cases of torch's operators")
    measurement.flag("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    measurement.flag("--threads", type=int, default=1)
    args = measurement.begin(argv)
    if not 1 <= args.threads <= (os.cpu_count() or 1):
        measurement.parser.error(f"--threads is {args.threads}; it must be 1 to {os.cpu_count()}")
    torch.set_num_threads(args.threads)
    rates = ", ".join(f"{name} {gemm_rate(getattr(torch, name)) / 1e9:.0f}" for name in args.dtypes)
    measurement.note(f"reads {read_bandwidth(args.threads) / 1e9:.1f} GB/s; products, GFLOP/s: {rates}")
    worst = inf
    for case, with_torch in all_cases(args.dtypes, quick=args.quick):
        compares = args.torch == "all" or (args.torch == "some" and with_torch)
        kernels = ("native", "torch") if compares else ("native",)
        for each in measure(case, kernels, args.threads, _QUICK_ROUNDS if args.quick else _ROUNDS):
            measurement.row(each)
            worst = min(worst, each["share"]) if each["kernel"] == "native" else worst
    measurement.note("share: of the larger of both limits")
    measurement.bar(Bar(name="least share of the C++ kernel", value=worst, limit=BAR, is_floor=True))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
