"""Measures how fast prompts are computed on a CPU, against their bound: `python -m tests.measure.prompts`.

A prompt runs in steps of the worker's token budget, as the worker runs them for one request. Owns the rounds, the bound
(tests/measure/README.md) and the report.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpu_worker.attention.layers import AttentionKind
from gpu_worker.checkpoint.linear import MergedLinear
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import start
from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.started import StartedRows
from tests.measure.harness import Bar, Measurement, percentiles
from tests.measure.workload import PAGE_SIZE, model_folder

BAR = 0.85
LENGTHS, QUICK_LENGTHS = (128, 512, 1024, 4096), (128, 512)
# Rounds of each length; fewer of long prompts, which take a second.
ROUNDS, QUICK_ROUNDS, LONG = 15, 3, 2048


def visible_pairs(kind: AttentionKind, length: int) -> int:
    """The pairs of a query and a position that it sees, in a prompt of `length` tokens."""
    pattern, contexts = kind.pattern, np.arange(1, length + 1)
    if pattern.window is not None:
        contexts = np.minimum(contexts, pattern.window + pattern.sink_tokens)
    return int(contexts.sum())


def attention_flops(kinds: Sequence[AttentionKind], length: int) -> int:
    """Floating-point operations of the products of attention in a prompt, in layers of these kinds."""
    return sum(2 * kind.num_heads * (kind.key_dim + kind.value_dim) * visible_pairs(kind, length) for kind in kinds)


def prompt_plans(runner: Runner, length: int) -> list[Plan]:
    """The steps of one prompt that is alone; the last samples a token."""
    geometry, row = runner.geometry, np.ones(1, np.int32)
    most = geometry.token_budget - geometry.token_budget % geometry.chunk_align
    tokens = np.random.default_rng(0).integers(4, geometry.vocab_size, length).astype(np.int32)
    pages = np.arange(1, -(-length // geometry.page_size) + 1, dtype=np.int32)
    started = StartedRows.of_prompts(row, [tokens], [pages])
    return [
        Plan(
            generation=0,
            step=1,
            checksum=0,
            **({"started": started} if begin == 0 else {}),
            chunk_rows=row,
            chunk_starts=row * begin,
            chunk_counts=row * min(most, length - begin),
            chunk_samples=np.array([begin + most >= length]),
        )
        for begin in range(0, length, most)
    ]


class Linears:
    """The matrix products of a prompt: the layers in the order in which the model called them, and their inputs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[tuple[nn.Module, Tensor]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the calls of linear layers meanwhile."""

        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._calls.append((module, inputs[0].clone()))

        linears = [m for m in self._model.modules() if hasattr(m, "in_features") and not isinstance(m, MergedLinear)]
        hooks = [module.register_forward_pre_hook(record) for module in linears]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def flops(self) -> int:
        """Floating-point operations of the calls with more than one token."""
        return sum(
            2 * x.numel() * module.out_features  # type: ignore[operator]
            for module, x in self._calls
            if _num_tokens(x) > 1
        )

    @torch.inference_mode()
    def run(self) -> tuple[float, float]:
        """Repeats the calls. Returns the seconds of those with more than one token, and of the others."""
        spent = [0.0, 0.0]
        for module, x in self._calls:
            begun = time.perf_counter()
            module(x)
            spent[_num_tokens(x) == 1] += time.perf_counter() - begun
        return spent[0], spent[1]


def _num_tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def measure(runner: Runner, length: int, rounds: int) -> dict[str, Any]:
    """The medians of prompts of `length` tokens, on a warm runner, over rounds in which the products and the prompt
    take turns. Linears are the products of a prompt's tokens, logits those of its last token alone."""
    model = runner.on_device.model
    plans, linears = prompt_plans(runner, length), Linears(model)
    with linears.recorded():
        runner.rehearse(*plans)
    kinds = [module.paged_layer.kind for module in model.modules() if hasattr(module, "paged_layer")]
    flops = attention_flops(kinds, length)
    times: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        products, logits = linears.run()
        prompt = sum(outcome.compute_us for outcome in runner.rehearse(*plans)) / 1e6
        attention = flops * products / linears.flops
        times.append((prompt, products, logits, attention))
    shares = [(products + logits + attention) / prompt for prompt, products, logits, attention in times]
    prompt, products, logits, attention = (median(each) for each in zip(*times, strict=True))
    return {
        "tokens": length,
        "prompt_ms": prompt * 1e3,
        "linears_ms": products * 1e3,
        "logits_ms": logits * 1e3,
        "attention_bound_ms": attention * 1e3,
        "gemm_gflops": linears.flops / products / 1e9,
        "share": median(shares),
        "spread": percentiles(shares, (10, 90)),
    }


def profile(runner: Runner, length: int) -> str:
    """The operators of one prompt by their own time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        runner.rehearse(*prompt_plans(runner, length))
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40)


@contextmanager
def long_model() -> Iterator[Path]:
    """The model of all benchmarks with a maximum length for the longest prompt; only its config differs."""
    folder = model_folder()
    with tempfile.TemporaryDirectory(prefix="tandem-prompts-") as name:
        for path in folder.iterdir():
            (Path(name) / path.name).symlink_to(path)
        config = json.loads((folder / "config.json").read_text())
        (Path(name) / "config.json").unlink()
        (Path(name) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * max(LENGTHS)}))
        yield Path(name)


def settings_of(folder: Path, args: argparse.Namespace) -> WorkerSettings:
    """A worker of the benchmarks' model, with pages for the longest prompt."""
    chosen: dict[str, Any] = {"device": "cpu", "dtype": args.dtype, "threads": args.threads}
    sizes = {"page_size": PAGE_SIZE, "max_rows": 8, "max_length": max(args.tokens) + PAGE_SIZE, "num_pages": 64}
    return WorkerSettings(model=str(folder), **chosen, **sizes)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures. With one thread it pins this process to one core. Returns 1 if a length misses the bar."""
    measurement = Measurement("prompts")
    measurement.flag("--quick", action="store_true", help="two lengths, three rounds")
    measurement.flag("--tokens", type=int, nargs="+", help="lengths of prompts")
    measurement.flag("--dtype", choices=("float32", "bfloat16"), default="float32")
    measurement.flag("--threads", type=int, default=1)
    measurement.flag("--profile", action="store_true", help="print the operators of each prompt by time")
    args = measurement.begin(argv)
    args.tokens = args.tokens or (QUICK_LENGTHS if args.quick else LENGTHS)
    if not 1 <= min(args.tokens) <= max(args.tokens) <= max(LENGTHS):
        measurement.parser.error(f"--tokens must be 1 to {max(LENGTHS)}")
    if args.threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with long_model() as folder:
        runner, *_ = start(settings_of(folder, args), folder)
        for length in args.tokens:
            rounds = QUICK_ROUNDS if args.quick else ROUNDS
            found = measure(runner, length, rounds if length < LONG else max(3, rounds // 3))
            measurement.row({"dtype": args.dtype, "threads": args.threads, **found})
            name = f"share of the bound, {length} tokens"
            measurement.bar(Bar(name=name, value=found["share"], limit=BAR, is_floor=True))
            if args.profile:
                print(profile(runner, length), file=sys.stderr)
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
