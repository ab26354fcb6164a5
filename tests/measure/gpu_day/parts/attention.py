"""Decode attention: bytes of K and V per second by rows, contexts and kernel options, beside the rate of a copy.

Runs the worker's own masks, set by a step of a one-layer model, and kernels with other options on the same masks. The
layers' pools together are 8 times the device's cache, so that K and V come from memory. The last table is what
`gpu_worker/attention/kernel_options.toml` holds per dtype, head dimension, group and slots.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_worker.attention.flex_kernel import DecodeAttention, FlexKernel
from gpu_worker.step.runner import Runner
from tests.measure.gpu_day import published
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import config_of
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.runners import cold_runner, free_memory
from tests.measure.gpu_day.synthetic_plans import Generations, decode_plans
from tests.measure.gpu_day.timing import cache_bytes, copy_rate, device_seconds

Options = dict[str, int]

_CACHES = 8
_REPEATS = 7
_PAGE_SIZE = 128
_MODELS = ("Qwen3-0.6B", "Llama-3.2-1B", "Gemma-2-2b")
_CONTEXTS = (512, 1024, 4096)
# The context by which options are compared.
_JUDGED = 1024
_GRID: tuple[Options, ...] = tuple(
    {"num_stages": stages, "num_warps": warps, "BLOCK_N": block_n}
    for block_n in (64, 32, 128)
    for warps in (4, 2, 8)
    for stages in (2, 3)
)
_SPLITS = (1, 2, 4, 8, 16, 32)
_TINY_GRID: tuple[Options, ...] = ({"PARTITION_SIZE": 32},)
_MAIN_ROWS, _OTHER_ROWS = (256, 128, 1, 16, 64), (192, 96, 32, 8, 4, 2)
_POINTS = (
    *((_MODELS[0], rows) for rows in _MAIN_ROWS),
    *((model, rows) for model in _MODELS[1:] for rows in _MAIN_ROWS[:3]),
    *((_MODELS[0], rows) for rows in _OTHER_ROWS),
    *((model, rows) for model in _MODELS[1:] for rows in (*_MAIN_ROWS[3:], *_OTHER_ROWS)),
)
_TINY_POINTS = (("tiny Qwen3", 2),)
# Of the grid measured at a model's first number of rows, this many are measured at the others.
_KEPT = 4
# Splits help where rows and heads do not fill the device.
_MOST_ROWS_SPLIT = 32
_LEAST_SECONDS_LEFT = 25.0


@dataclass(kw_only=True)
class _Sweep:
    """The results so far."""

    day: Day
    copy_rate: float
    rows: list[list[Any]] = field(default_factory=list)
    best: dict[tuple[str, int], tuple[float, Options]] = field(default_factory=dict)

    def add(self, model: str, num_rows: int, context: int, options: Options, rates: list[float]) -> None:
        """One measured point, with rates in bytes per second."""
        rate = statistics.median(rates)
        words = ", ".join(f"{name} {value}" for name, value in options.items()) or "the worker's own"
        share = 100 * rate / self.copy_rate
        self.rows.append([model, num_rows, context, words, rate / 1e9, share, 100 * (max(rates) / min(rates) - 1)])
        columns = ["model", "rows", "context", "options", "GB/s", "% of a copy", "spread %"]
        self.day.record.table("Decode attention, K and V read", columns, self.rows, Kind.MEASURED)
        print(f"  {model}, {num_rows} rows of {context}: {words}: {rate / 1e9:.0f} GB/s, {share:.0f} %", flush=True)
        if context == _judged(self.day) and rate > self.best.get((model, num_rows), (0.0, {}))[0]:
            self.best[model, num_rows] = rate, options


def run(day: Day) -> None:
    """Measures by priority until the time is over. A model's first number of rows measures the whole grid."""
    device = torch.device(day.device)
    with day.phase("rate of a copy"):
        rates = copy_rate(device)
    day.record.repeated("copy", [rate / 1e9 for rate in rates], "GB/s", note="read and written")
    sweep = _Sweep(day=day, copy_rate=statistics.median(rates))
    grids: dict[str, list[Options]] = {}
    left_out: list[str] = []
    for model, num_rows in _TINY_POINTS if day.tiny else _POINTS:
        if day.seconds_left() < _LEAST_SECONDS_LEFT:
            left_out.append(f"{model} with {num_rows} rows")
            continue
        grid = grids.get(model) or [{}, *(_TINY_GRID if day.tiny else _GRID)]
        with day.phase(f"{model}, {num_rows} rows"):
            found = _measure(sweep, model, num_rows, grid)
        if model not in grids:
            ranked = sorted((rate, i) for i, rate in enumerate(found) if i)
            grids[model] = [{}, *(grid[i] for _, i in ranked[-_KEPT:])]
        _report(day, sweep)
    if left_out:
        day.record.note(f"left out, because the time was over: {', '.join(left_out)}")
    of_128 = [rate / sweep.copy_rate for (_, num_rows), (rate, _) in sweep.best.items() if num_rows >= 128]
    if of_128:
        note = "the worst of all models, with its best options"
        day.record.figure("attention over a copy at 128 rows and more", min(of_128), "", note=note)
        day.record.figure("aim", published.AIM_BANDWIDTH_SHARE, "of a copy", Kind.AIM, note="128 rows and more")


def _report(day: Day, sweep: _Sweep) -> None:
    rows = [
        [day.dtype, *_head_of(model), num_rows, repr(options), rate / 1e9, 100 * rate / sweep.copy_rate]
        for (model, num_rows), (rate, options) in sorted(sweep.best.items())
    ]
    columns = ["dtype", "head dimension", "group", "slots", "options", "GB/s", "% of a copy"]
    day.record.table(f"Best options at a context of {_judged(day)}", columns, rows, Kind.MEASURED)
    lines = [[line] for line in _entries(day, sweep)]
    day.record.table("Lines for kernel_options.toml", ["decode"], lines, Kind.MEASURED)


def _entries(day: Day, sweep: _Sweep) -> list[str]:
    """The best options as lines of the worker's table, in its order: a line's numbers are upper limits.

    None for the points at which the worker's own line is the best.
    """
    card = "" if day.on_cpu else torch.cuda.get_device_name()
    lines: list[str] = []
    for point in sorted(sweep.best, key=lambda point: (*_head_of(point[0]), point[1])):
        head_dim, group = _head_of(point[0])
        fields = {"itemsize": getattr(torch, day.dtype).itemsize, "head_dim": head_dim, "group": group}
        fields |= {"bucket": point[1]} | {name.lower(): value for name, value in sweep.best[point][1].items()}
        if sweep.best[point][1]:
            inner = ", ".join(f"{name} = {value}" for name, value in fields.items())
            lines.append(f'{{ {inner}, device = "{card}" }},')
    return lines


def _head_of(model: str) -> tuple[int, int]:
    config = config_of(model)
    return config.head_dim, config.num_attention_heads // config.num_key_value_heads


def _judged(day: Day) -> int:
    return 40 if day.tiny else _JUDGED


def _measure(sweep: _Sweep, model: str, num_rows: int, grid: list[Options]) -> list[float]:
    """Measures the options at every context. Returns for each its rate at the judged context, 0 if it was left out."""
    day, device = sweep.day, torch.device(sweep.day.device)
    contexts = (_judged(day),) if day.tiny else _CONTEXTS
    runner = _runner(day, model, num_rows, max(contexts))
    generations = Generations()
    attention = max(runner.steps.kernels.decode.items())[1][0]
    pools = _pools(runner, num_rows, min(contexts), device)
    rates = [0.0] * len(grid)
    for i, options in enumerate([*grid, *([] if day.on_cpu else _split(grid, num_rows))]):
        if day.seconds_left() < _LEAST_SECONDS_LEFT:
            break
        kernel = _kernel(attention, options)
        if kernel is None:
            continue
        for context in contexts:
            _set_masks(runner, num_rows, context, generations)
            measured = _rates(attention, kernel, pools, num_rows * context, device)
            if measured is None:
                day.record.note(f"{model}, {num_rows} rows: {options} does not compile")
                break
            sweep.add(model, num_rows, context, options, measured)
            if context == _judged(day) and i < len(rates):
                rates[i] = statistics.median(measured)
    del runner, attention, pools
    free_memory(day.device)
    return rates


def _split(grid: list[Options], num_rows: int) -> list[Options]:
    """The best options so far, with other numbers of splits."""
    if num_rows > _MOST_ROWS_SPLIT:
        return []
    return [{**grid[-1], "SPLIT_KV": splits} for splits in _SPLITS]


def _runner(day: Day, model: str, num_rows: int, longest: int) -> Runner:
    """A runner of one layer with the model's heads; its kernels compile at their first call."""
    config = config_of(model)
    config.num_hidden_layers, config.vocab_size = 1, 512
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    page_size = 16 if day.tiny else _PAGE_SIZE
    pages = num_rows * (-(-longest // page_size) + 1) + 1
    length = (pages - 1) // num_rows * page_size
    return cold_runner(day, config, num_pages=pages, max_rows=num_rows, max_length=length, page_size=page_size)


def _set_masks(runner: Runner, num_rows: int, context: int, generations: Generations) -> None:
    """Runs a decode step at this context, which leaves its masks on the device."""
    generation = generations.next()
    [plan] = decode_plans(runner.geometry, rows=num_rows, context=context, steps=1, generation=generation)
    runner.submit(plan)
    outcome = runner.collect()
    assert outcome is not None and not outcome.detail, outcome


def _pools(runner: Runner, num_rows: int, context: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """K and V of as many layers as make `_CACHES` times the cache at the shortest context; two at least."""
    keys, values = runner.on_device.cache.keys[0], runner.on_device.cache.values[0]
    touched = 2 * num_rows * context * keys.shape[0] * keys.shape[2] * keys.element_size()
    count = max(2, -(-_CACHES * cache_bytes(device) // touched))
    return [(torch.randn_like(keys)[None], torch.randn_like(values)[None]) for _ in range(count)]


def _kernel(attention: DecodeAttention, options: Options) -> FlexKernel | None:
    """The attention's kernel with other options; without any its own; None if a tile would be larger than a block."""
    if not options:
        return attention.kernel
    kind, mask, query = attention.kind, attention.mask, attention.query
    base = {} if query.is_cpu else {"BACKEND": "TRITON_DECODE"}
    blocks = mask.block_mask(kind.group)
    if options.get("BLOCK_N", 0) > blocks.BLOCK_SIZE[1]:
        return None
    return FlexKernel(
        kind,
        blocks,
        learned_sink_slot=mask.view.learned_sink_slot,
        rows_are_heads=True,
        options=base | options,
    )


def _rates(
    attention: DecodeAttention,
    kernel: FlexKernel,
    pools: list[tuple[Tensor, Tensor]],
    num_positions: int,
    device: torch.device,
) -> list[float] | None:
    """Bytes per second of K and V that rows see, of each repeat; None if the kernel does not compile."""

    def every_layer() -> None:
        for key, value in pools:
            kernel(attention.query, key, value, None)

    try:
        seconds = device_seconds(every_layer, device, repeats=_REPEATS)
    except Exception as error:  # compilers raise many kinds for options that do not fit
        if kernel is attention.kernel:
            raise
        print(f"  {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        return None
    key = pools[0][0]
    per_position = 2 * key.shape[1] * key.shape[3] * key.element_size()
    return [num_positions * per_position * len(pools) / s for s in seconds]
