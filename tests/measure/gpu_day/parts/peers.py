"""Other engines on the same machine: Transformers' continuous batching, and flex-nano-vLLM from a checkout.

Each runs in this process, one after another, on random weights of the same shape and token-id prompts, after a short
unmeasured round. nano-vllm needs flash-attn, so only its published figure appears.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tests.measure.gpu_day import published, workloads
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import TINY_MODEL, config_of
from tests.measure.gpu_day.runners import free_memory
from tests.measure.gpu_day.workloads import Requests
from tests.measure.serving.peers.hugging_face import run_continuous
from tests.measure.workload import Workload

_PAGE_SIZE = 128
_MAX_LENGTH = 2048
_FLEX_POOL_TOKENS = 140_432


def run(day: Day) -> None:
    """Transformers on nano-vllm's workload, greedy; flex-nano-vLLM, if there is a checkout, on its own."""
    _transformers(day)
    if day.flex_nano_vllm:
        _flex_nano_vllm(day)
    else:
        day.record.note("flex-nano-vLLM was not measured: --flex-nano-vllm names a checkout")
    if not day.tiny:
        published.nano_vllm(day.record)


def _transformers(day: Day) -> None:
    requests = workloads.tiny() if day.tiny else workloads.nano_vllm()
    with day.phase("Transformers: a model"):
        transformers_logging.disable_progress_bar()
        model = _model(day, TINY_MODEL if day.tiny else "Qwen3-0.6B", AutoModelForCausalLM.from_config, "sdpa")
    concurrent, budget = (4, 128) if day.tiny else (256, 4096)
    short = Workload(prompts=requests.prompts[:4], output_lengths=[2] * 4, concurrent=concurrent)
    workload = Workload(prompts=requests.prompts, output_lengths=requests.output_lengths, concurrent=concurrent)
    run_continuous(model, short, max_batch_tokens=budget)
    with day.phase("Transformers: continuous batching"):
        tokens, times = run_continuous(model, workload, max_batch_tokens=budget)
    day.record.check(
        "Transformers: every request has its tokens", [len(found) for found in tokens] == requests.output_lengths
    )
    rate = requests.num_output_tokens / max(stamps[-1] for stamps in times)
    note = f"{concurrent} at once, greedy, sdpa"
    day.record.figure("Transformers' continuous batching", rate, "output tokens/s", note=note)
    del model
    free_memory(day.device)


def _flex_nano_vllm(day: Day) -> None:
    """Gemma-2-2b's shape on the requests of `tutorial`, with CUDA graphs, as its benchmark.py runs it."""
    sys.path.insert(0, day.flex_nano_vllm)
    from flex_nano_vllm import Gemma2ForCausalLM
    from flex_nano_vllm.inference import Inference, SamplingParams, Sequence

    class FromIds(Inference):  # type: ignore[misc]
        """Takes the number of a request as its text, and the request's token ids as its prompt."""

        requests: Requests

        def tokenize(self, sequences: list[Any]) -> None:
            for sequence in sequences:
                sequence.input_ids = torch.tensor(self.requests.prompts[int(sequence.text)])
                sequence.input_length = sequence.input_ids.shape[0]

    requests = workloads.flex_nano_vllm()
    with day.phase("flex-nano-vLLM: a model"):
        model = _model(day, "Gemma-2-2b", Gemma2ForCausalLM._from_config)
        engine = FromIds(
            model,
            # No token ends an output early.
            SimpleNamespace(eos_token_id=-1),
            max_batch_size=256,
            max_seq_length=_MAX_LENGTH,
            n_pages=_FLEX_POOL_TOKENS // _PAGE_SIZE,
            kernel_options={"BLOCK_M": 32, "BLOCK_N": 32},
            prefill_length_limit=8192,
        )
        engine.requests = requests
    with day.phase("flex-nano-vLLM: graphs and a short round"):
        engine.generate([Sequence(str(i)) for i in range(4)], sampling_params=SamplingParams(4), capture_cudagraph=True)
    sequences = [Sequence(str(i)) for i in range(len(requests.prompts))]
    with day.phase("flex-nano-vLLM"):
        begun = time.perf_counter()
        engine.generate(sequences, sampling_params=[SamplingParams(n) for n in requests.output_lengths])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    day.record.check(
        "flex-nano-vLLM: every request has its tokens",
        [sequence.output_length for sequence in sequences] == requests.output_lengths,
    )
    rate = requests.num_output_tokens / seconds
    note = f"a pool of {_FLEX_POOL_TOKENS:,} tokens, as in tutorial at 90 %"
    day.record.figure("flex-nano-vLLM", rate, "output tokens/s", note=note)


def _model(day: Day, shape: str, make: Any, attention: str = "") -> Any:
    torch.manual_seed(0)
    options = {"attn_implementation": attention} if attention else {}
    with torch.device(day.device):
        return make(config_of(shape), dtype=getattr(torch, day.dtype), **options).eval()
