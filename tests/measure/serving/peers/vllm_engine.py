"""vLLM's CPU build, in its own environment.

Owns one process that runs vLLM's engine step by step, its scheduler included. Compiled, prefix caching off, token ids
in and out, so that vLLM neither tokenizes nor decodes text. The parent sets the affinity, the threads, and the
libraries that vLLM's documentation for CPUs asks to load first (tcmalloc, libiomp5).
"""

import os
import time
from pathlib import Path

# In one process the engine needs no second core and no copies between processes; with two threads it is as fast as in
# its own three processes. Read when vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# Its cache of whole compiled models cannot be read by every torch; Inductor's own cache keeps the kernels.
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

from vllm import SamplingParams, __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tests.measure.result import EngineResult
from tests.measure.serving.peers.stream import Callers
from tests.measure.workload import PAGE_SIZE, Workload

_POOL_BYTES = 1 << 30


def _run(engine: LLMEngine, workload: Workload) -> Callers:
    callers = Callers(workload)
    while not callers.are_done:
        for i in callers.due():
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=workload.output_lengths[i],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(i), {"prompt_token_ids": workload.prompts[i]}, sampling)
        for output in engine.step():
            callers.take(int(output.request_id), output.outputs[0].token_ids)
    return callers


def run(model: str, workload: str, threads: int) -> EngineResult:
    load = Workload.load(Path(workload))
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=load.max_length,
            max_num_seqs=load.concurrent,
            block_size=PAGE_SIZE,
            kv_cache_memory_bytes=_POOL_BYTES,
            enable_prefix_caching=False,
            seed=0,
        )
    )
    _run(engine, load.first_round(4))
    cpu = time.process_time()
    callers = _run(engine, load)
    cpu = time.process_time() - cpu
    preloaded = " and ".join(Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name)
    note = (
        f"vLLM {__version__}, compiled, its engine alone in one process, {load.concurrent} sequences at most, "
        f"prefix caching off, {threads} threads, {preloaded or 'nothing'} preloaded"
    )
    return callers.result("vllm", note, cpu)
