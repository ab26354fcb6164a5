"""Steps that compute only prompts: TFLOP/s of the whole step and of its attention, beside a matrix product's.

FLOP are those that a causal forward needs: 2 per weight and token, and 2 each for QK and PV per head, dimension and
visible pair, which is half of all pairs.
"""

import statistics

import torch

from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.runners import Served, warm
from tests.measure.gpu_day.synthetic_plans import Generations, prefill_plan
from tests.measure.gpu_day.timing import device_seconds, matmul_rate

_SIZES = {"max_rows": 64, "max_length": 8192, "token_budget": 4096, "num_pages": 700}
_PROMPTS = ([4096], [2048] * 2, [512] * 8, [128] * 32)
_REPEATS = 7


def run(day: Day) -> None:
    """One step for each mix of prompts, repeated."""
    device = torch.device(day.device)
    with day.phase("rate of a matrix product"):
        rates = matmul_rate(device, getattr(torch, day.dtype), size=256 if day.tiny else 8192)
    day.record.repeated("matrix product", [rate / 1e12 for rate in rates], "TFLOP/s")
    served = warm(day, "Qwen3-0.6B", _SIZES)
    generations = Generations()
    for lengths in ([100], [20, 30]) if day.tiny else _PROMPTS:
        name = f"{len(lengths)} prompts of {lengths[0]}"
        with day.phase(name):
            _measure(day, served, lengths, name, generations, statistics.median(rates))


def _measure(day: Day, served: Served, lengths: list[int], name: str, generations: Generations, matmul: float) -> None:
    runner, seconds = served.runner, list[float]()
    for _ in range(_REPEATS):
        runner.submit(prefill_plan(served.geometry, lengths=lengths, generation=generations.next()))
        outcome = runner.collect()
        assert outcome is not None and outcome.tokens.size == len(lengths), outcome
        seconds.append(outcome.compute_us / 1e6)
    # The first step of a shape may load kernels.
    steps = seconds[1:]
    flops = step_flops(served, lengths)
    day.record.repeated(f"{name}: step", [s * 1e3 for s in steps], "ms")
    day.record.repeated(f"{name}: step", [flops / s / 1e12 for s in steps], "TFLOP/s")
    share = flops / statistics.median(steps) / matmul
    day.record.figure(f"{name}: step over a matrix product", share, "", note="padding and attention count as time")
    # The step has left its masks on the device.
    kernels = runner.steps.kernels
    attention = kernels.prefill[min(size for size in kernels.prefill if size >= sum(lengths))][0]
    key, value = runner.on_device.cache.keys[0][None], runner.on_device.cache.values[0][None]
    query = attention.query.transpose(0, 1).unsqueeze(0)
    of_layer = device_seconds(
        lambda: attention.kernel(query, key, value, None), torch.device(day.device), repeats=_REPEATS
    )
    flops_of_layer = attention_flops(served, lengths) / len(served.layers.layers)
    day.record.repeated(f"{name}: attention of a layer", [flops_of_layer / s / 1e12 for s in of_layer], "TFLOP/s")


def step_flops(served: Served, lengths: list[int]) -> float:
    """FLOP of a step of whole prompts of these lengths, logits of their last tokens included."""
    config = served.model.config
    body = sum(p.numel() for p in served.model.base_model.layers.parameters())
    packed = sum(getattr(module, "num_bytes", 0) for module in served.model.base_model.layers.modules()) // 4
    head = config.hidden_size * config.vocab_size
    return 2 * (body + packed) * sum(lengths) + 2 * head * len(lengths) + attention_flops(served, lengths)


def attention_flops(served: Served, lengths: list[int]) -> float:
    """FLOP of causal attention over whole prompts, all layers."""
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return sum(2 * 2 * layer.kind.num_heads * layer.kind.key_dim * pairs for layer in served.layers.layers)
