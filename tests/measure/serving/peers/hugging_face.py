"""Transformers as an engine.

Owns one process per engine and run, placed by the parent. Each peer tries both attention implementations for CPUs in a
short round, and the faster one is measured.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from tests.measure.machine import peak_mb
from tests.measure.result import EngineResult
from tests.measure.workload import PAGE_SIZE, Workload

Outputs = tuple[list[list[int]], list[list[float]]]
_PROBE_TOKENS = 16
_GREEDY = {"do_sample": False, "pad_token_id": 0}


class _Clock(StoppingCriteria):
    """Never stops generation; records the time of each step's tokens."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter() - self.begun)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run_static(model: PreTrainedModel, workload: Workload) -> Outputs:
    """Runs batches in order, each to its longest output. Only requested tokens count, as if steps were streamed."""
    begun = time.perf_counter()
    outputs: list[list[int]] = []
    times: list[list[float]] = []
    for first in range(0, len(workload.prompts), workload.concurrent):
        prompts = workload.prompts[first : first + workload.concurrent]
        lengths = workload.output_lengths[first : first + workload.concurrent]
        width = max(map(len, prompts))
        clock = _Clock(begun)
        sequences = model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=max(lengths),
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([clock]),
            **_GREEDY,
        )
        for row, length in zip(sequences[:, width:].tolist(), lengths, strict=True):
            outputs.append(row[:length])
            times.append(clock.times[:length])
    return outputs, times


def run_continuous(model: PreTrainedModel, workload: Workload, *, max_batch_tokens: int = 512) -> Outputs:
    """Runs `generate_batch`'s manager, the only interface that gives every request its own length."""
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=workload.concurrent * (workload.max_length // PAGE_SIZE) + 1,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=workload.concurrent,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(eos_token_id=-1, max_new_tokens=max(workload.output_lengths), **_GREEDY)
    outputs: dict[str, Outputs] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        begun = time.perf_counter()
        for i, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lengths, strict=True)):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=length, record_timestamps=True)
        while len(outputs) < len(workload.prompts):
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "continuous batching ended without an answer"
                continue
            assert result.error is None, result.error
            if result.is_finished():
                stamps = [stamp - begun for stamp in result.timestamps or []]
                outputs[result.request_id] = (result.generated_tokens, stamps)
    ordered = [outputs[str(i)] for i in range(len(workload.prompts))]
    return [tokens for tokens, _ in ordered], [times for _, times in ordered]


ENGINES: dict[str, tuple[Callable[[PreTrainedModel, Workload], Outputs], tuple[str, str]]] = {
    "static": (run_static, ("sdpa", "eager")),
    "continuous": (run_continuous, ("sdpa", "paged|eager")),
}
NOTES = {
    "static": "generate() in static left-padded batches, in order, each to its longest output",
    "continuous": "continuous batching (generate_batch's manager)",
}


def run(model: str, workload: str, threads: int, *, engine: str) -> EngineResult:
    """Loads the model, tries both attention implementations, and measures the workload of a file with the faster."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    load = Workload.load(Path(workload))
    run_all, attentions = ENGINES[engine]
    probe, warm_up = load.first_round(_PROBE_TOKENS), load.first_round(2)
    probed: dict[str, float] = {}
    for attention in attentions:
        loaded = _load(model, attention)
        run_all(loaded, warm_up)
        # CPU time, so that other load on the machine does not decide.
        begun = time.process_time()
        run_all(loaded, probe)
        probed[attention] = time.process_time() - begun
    attention = min(probed, key=probed.__getitem__)
    loaded = _load(model, attention)
    run_all(loaded, warm_up)
    cpu = time.process_time()
    tokens, times = run_all(loaded, load)
    cpu = time.process_time() - cpu
    note = f"{load.concurrent} at once, {attention}, the faster of {' and '.join(attentions)}"
    return EngineResult(
        engine=engine,
        note=f"{NOTES[engine]}, {note}",
        seconds=max(stamps[-1] for stamps in times),
        tokens=tokens,
        times=times,
        engine_cpu_seconds=cpu,
        peak_mb={"engine": peak_mb()},
    )


def _load(folder: str, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
