"""The limit of a workload on this machine.

Measures how fast threads read memory and multiply matrices of the model's shapes, and computes from both the least time
of the workload in float32. Runs in a process of its own, placed and threaded as an engine. Source of the bound: prefill
is FLOP / rate, a decode step max(bytes / bandwidth, FLOP / rate), and nothing else takes time. No engine reaches it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.measure.workload import MODEL, Workload

_STREAM_BYTES = 512 << 20
_PREFILL_ROWS = 512
_SECONDS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured: bytes per second, and FLOP per second at the rows of a prompt's step and of a decode step."""

    bandwidth: float
    prefill: float
    decode: float


def linear_shapes() -> list[tuple[int, int]]:
    """Returns (inputs, outputs) of one layer's matrices: QKV, output, gate and up, down."""
    hidden, inner, dim = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["head_dim"]
    heads, kv_heads = MODEL["num_attention_heads"], MODEL["num_key_value_heads"]
    return [
        (hidden, (heads + 2 * kv_heads) * dim),
        (heads * dim, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]


def num_layer_weights() -> int:
    return MODEL["num_hidden_layers"] * sum(k * n for k, n in linear_shapes())


def num_head_weights() -> int:
    return MODEL["hidden_size"] * MODEL["vocab_size"]


def decode_steps(workload: Workload) -> Iterator[list[int]]:
    """Yields the contexts of each decode step, in tokens, of a scheduler that is never idle and needs no time.

    A request's prompt gives its first token, and each decode step one more. A row is taken again at once.
    """
    waiting = [(len(p), n - 1) for p, n in zip(workload.prompts, workload.output_lengths, strict=True)]
    waiting = [request for request in waiting if request[1]][::-1]
    running: list[tuple[int, int]] = []
    while waiting or running:
        while waiting and len(running) < workload.concurrent:
            running.append(waiting.pop())
        running = [(context + 1, left - 1) for context, left in running]
        yield [context for context, _ in running]
        running = [request for request in running if request[1]]


def limit_seconds(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Returns the least seconds of all prompts, and those of all decode steps."""
    layers, heads, dim = MODEL["num_hidden_layers"], MODEL["num_attention_heads"], MODEL["head_dim"]
    weights, head = num_layer_weights(), num_head_weights()
    kv_bytes = 2 * layers * MODEL["num_key_value_heads"] * dim * 4
    prefill = 0.0
    for length in map(len, workload.prompts):
        # A query sees half of the prompt on average; only the last token's logits are needed.
        prefill += 2 * weights * length + 2 * layers * heads * dim * length**2 + 2 * head
    decode = 0.0
    for contexts in decode_steps(workload):
        num_bytes = 4 * (weights + head) + kv_bytes * sum(contexts)
        flop = 2 * (weights + head) * len(contexts) + 4 * layers * heads * dim * sum(contexts)
        decode += max(num_bytes / rates.bandwidth, flop / rates.decode)
    return prefill / rates.prefill, decode


def measure(threads: int, concurrent: int) -> Rates:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        return Rates(bandwidth=_bandwidth(), prefill=_gemm_rate(_PREFILL_ROWS), decode=_gemm_rate(max(1, concurrent)))


def _best_seconds(run: Callable[[], object]) -> float:
    """Returns the shortest time of a call; others of the machine only ever make it longer."""
    run()
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < _SECONDS:
        at = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - at)
    return best


def _bandwidth() -> float:
    """Returns bytes per second of the fastest of three ways to read a stream that no cache holds."""
    stream = torch.ones(_STREAM_BYTES // 4)
    rows = stream.view(-1, 4096)
    vector = torch.ones(4096)
    ways = (lambda: stream.sum(), lambda: torch.dot(stream, stream), lambda: torch.mv(rows, vector))
    return _STREAM_BYTES / min(_best_seconds(way) for way in ways)


def _gemm_rate(rows: int) -> float:
    """Returns FLOP per second of one layer's matrices in order, each by the faster of oneDNN's packed layout and mm."""
    flop, seconds = 0, 0.0
    for inputs, outputs in linear_shapes():
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        seconds += min(_best_seconds(way) for way in _ways(x, weight))
        flop += 2 * rows * inputs * outputs
    return flop / seconds


def _ways(x: Tensor, weight: Tensor) -> list[Callable[[], Tensor]]:
    transposed = weight.t().contiguous()
    ways: list[Callable[[], Tensor]] = [lambda: torch.nn.functional.linear(x, weight), lambda: x @ transposed]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return ways


def report(workload: str, threads: int) -> dict[str, float]:
    """Returns the figures of the limit of a workload's file."""
    load = Workload.load(Path(workload))
    rates = measure(threads, load.concurrent)
    prefill, decode = limit_seconds(load, rates)
    return {
        **asdict(rates),
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "tokens_per_second": load.num_output_tokens / (prefill + decode),
    }
