"""llama.cpp, in its own environment.

Owns one process that drives llama.cpp's library as its server does: every step is a batch of one token per running
sequence, then prompt tokens up to the batch size; greedy. Weights, K and V are float32. Flash attention is off, because
on a CPU it is less exact than float32: it chose a token with a logit 0.01 below the largest. The unified cache is
tried on and off in a short round, and the faster is measured.
"""

import ctypes
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests.measure.result import EngineResult
from tests.measure.serving.peers.gguf_model import gguf_file
from tests.measure.serving.peers.stream import Callers
from tests.measure.workload import Workload

# The server's default micro-batch. Its default batch of 2,048 tokens takes as long for all requests, but the prompts in
# it get their first tokens together, at its end.
_BATCH_TOKENS = 512
_PROBE_REQUESTS, _PROBE_TOKENS = 4, 16
_GGML_TYPE_F32 = 0


@dataclass(slots=True)
class _Row:
    """A request that runs. `next_token`: the token to compute next; None while prompt tokens are left."""

    request: int
    prompt: list[int]
    num_computed: int = 0
    next_token: int | None = None


class Context:
    """One context of llama.cpp with a sequence for each row of the workload."""

    def __init__(self, model: Any, workload: Workload, threads: int, *, unified: bool) -> None:
        self._rows = workload.concurrent
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = workload.concurrent * -(-workload.max_length // 256) * 256
        params.n_batch = _BATCH_TOKENS
        params.n_seq_max = workload.concurrent
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = _GGML_TYPE_F32
        params.kv_unified = unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context, "llama.cpp made no context"
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def run(self, workload: Workload) -> Callers:
        callers = Callers(workload)
        waiting: deque[int] = deque()
        rows: list[_Row | None] = [None] * self._rows
        while not callers.are_done:
            waiting += callers.due()
            for i, row in enumerate(rows):
                if row is None and waiting:
                    request = waiting.popleft()
                    rows[i] = _Row(request, workload.prompts[request])
            for i, token in self._step(rows):
                row = rows[i]
                assert row is not None
                row.next_token = token
                if callers.take(row.request, [token]):
                    rows[i] = None
                    memory = llama_cpp.llama_get_memory(self._context)
                    llama_cpp.llama_memory_seq_rm(memory, i, -1, -1)
        return callers

    def _step(self, rows: list[_Row | None]) -> list[tuple[int, int]]:
        """Computes one batch. Returns the sampled token of each row that has one, as (row, token)."""
        self._batch.n_tokens = 0
        sampled: list[int] = []
        for i, row in enumerate(rows):
            if row is not None and row.next_token is not None:
                self._add(i, row.next_token, row.num_computed, sampled=True)
                row.num_computed += 1
                sampled.append(i)
        for i, row in enumerate(rows):
            if row is None or row.next_token is not None:
                continue
            first = row.num_computed
            row.num_computed += min(_BATCH_TOKENS - self._batch.n_tokens, len(row.prompt) - first)
            has_all = row.num_computed == len(row.prompt)
            for position in range(first, row.num_computed):
                is_last = has_all and position == row.num_computed - 1
                self._add(i, row.prompt[position], position, sampled=is_last)
            if has_all:
                sampled.append(i)
        code = llama_cpp.llama_decode(self._context, self._batch)
        assert code == 0, f"llama_decode returned {code}"
        if not sampled:
            return []
        logits = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        tokens = np.ctypeslib.as_array(address, (len(sampled), self._num_tokens)).argmax(axis=1)
        return list(zip(sampled, tokens.tolist(), strict=True))

    def _add(self, row: int, token: int, position: int, *, sampled: bool) -> None:
        batch = self._batch
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, sampled
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
        batch.n_tokens = at + 1


def is_unified_faster(model: Any, workload: Workload, threads: int) -> bool:
    """Whether the unified cache needs less CPU time for a short round."""
    # Few, because a round of long prompts takes as long as a quarter of the workload.
    probe = workload.first_round(_PROBE_TOKENS)
    probe = probe.first_requests(min(_PROBE_REQUESTS, len(probe.prompts)))
    probed: dict[bool, float] = {}
    for unified in (True, False):
        context = Context(model, workload, threads, unified=unified)
        context.run(_warm_up(workload))
        begun = time.process_time()
        context.run(probe)
        probed[unified] = time.process_time() - begun
        context.close()
    return probed[True] < probed[False]


def _warm_up(workload: Workload) -> Workload:
    return workload.first_round(2).first_requests(1)


def run(model: str, workload: str, threads: int) -> EngineResult:
    load = Workload.load(Path(workload))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    loaded = llama_cpp.llama_model_load_from_file(os.fsencode(gguf_file(Path(model))), params)
    unified = is_unified_faster(loaded, load, threads)
    context = Context(loaded, load, threads, unified=unified)
    context.run(_warm_up(load))
    cpu = time.process_time()
    callers = context.run(load)
    cpu = time.process_time() - cpu
    note = (
        f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), float32, {load.concurrent} sequences, "
        f"{threads} threads, no flash attention, {'one cache' if unified else 'a cache per sequence'}, the faster"
    )
    return callers.result("llama", note, cpu)
