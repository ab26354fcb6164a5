"""mini-sglang's scheduler from a checkout: the three calls of its `normal_loop`, without its messages.

Owns its inputs. Faked: the engine's forward, which marks its rows computed as the real one does and samples random
tokens; pinned memory and streams, which a CPU lacks; the kernel that compares prompts, which no decode step calls. Its
page table and token pool are tensors on the CPU, so gathers run in place of kernel launches.
"""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.measure.schedulers.fakes import SteadyPeer, fake, fake_missing, package

_VOCAB_SIZE, _EOS = 32_000, 2
# mini-sglang's default.
_PAGE_SIZE = 1


class Peer(SteadyPeer):
    """`without_inputs_us` excludes making the model's input tensors, which is the worker's task in Tandem."""

    note = "_schedule_next_batch, _forward around a faked engine, _process_last_data; greedy, page size 1, no message"

    def __init__(self, folder: Path, num_rows: int, context: int, num_steps: int) -> None:
        sys.path.insert(0, str(folder / "python"))
        torch.set_num_threads(1)
        _without_pinned_memory()
        fake(["transformers"])
        fake_missing(["msgpack", "huggingface_hub", "tqdm", "tqdm.asyncio"])
        fake(["minisgl.kernel"])
        sys.modules["minisgl.kernel"].__dict__["fast_compare_key"] = _common_tokens
        package("minisgl.engine", folder / "python/minisgl/engine")
        sys.modules["minisgl.engine"].__dict__["EngineConfig"] = object
        from minisgl.core import Context, SamplingParams, set_global_ctx
        from minisgl.distributed import set_tp_info
        from minisgl.engine.sample import Sampler
        from minisgl.message import UserMsg
        from minisgl.scheduler.cache import CacheManager
        from minisgl.scheduler.decode import DecodeManager
        from minisgl.scheduler.prefill import PrefillManager
        from minisgl.scheduler.scheduler import Scheduler
        from minisgl.scheduler.table import TableManager

        device = torch.device("cpu")
        first = context - num_steps // 2
        longest = first + 64 + 2 * num_steps
        set_tp_info(rank=0, size=1)
        set_global_ctx(Context(_PAGE_SIZE))
        self._rng = torch.Generator().manual_seed(0)
        self._num_rows = num_rows
        self._inputs_ns = 0
        scheduler: Any = Scheduler.__new__(Scheduler)
        scheduler.engine = SimpleNamespace(
            device=device,
            page_table=torch.zeros((num_rows + 1, -(-longest // 32) * 32), dtype=torch.int32),
            max_seq_len=longest,
            attn_backend=SimpleNamespace(prepare_metadata=lambda batch: None),
            graph_runner=SimpleNamespace(pad_batch=lambda batch: setattr(batch, "padded_reqs", batch.reqs)),
            sampler=Sampler(device, _VOCAB_SIZE),
            forward_batch=self._forward_batch,
        )
        scheduler.device = device
        scheduler.table_manager = TableManager(num_rows, scheduler.engine.page_table)
        scheduler.cache_manager = CacheManager(num_rows * longest, _PAGE_SIZE, scheduler.engine.page_table, "radix")
        scheduler.decode_manager = DecodeManager(_PAGE_SIZE)
        scheduler.prefill_manager = PrefillManager(
            scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
        )
        scheduler.finished_reqs = set()
        scheduler.eos_token_id = _EOS
        scheduler.token_pool = scheduler.table_manager.token_pool
        scheduler.prefill_budget = 65_536
        scheduler.send_result = lambda reply: None
        prepare = scheduler._prepare_batch
        scheduler._prepare_batch = lambda batch: self._prepared(prepare, batch)
        self._scheduler = scheduler
        lengths = random.Random(0)
        for uid in range(num_rows):
            prompt = self._tokens(lengths.randint(first - 64, first + 64))
            sampling = SamplingParams(max_tokens=longest - len(prompt))
            scheduler._process_one_msg(UserMsg(uid=uid, input_ids=prompt, sampling_params=sampling))
        with torch.inference_mode():
            while scheduler.prefill_manager.runnable:
                self._step()

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(_EOS + 1, _VOCAB_SIZE, (count,), generator=self._rng, dtype=torch.int32)

    def _forward_batch(self, batch: Any, args: Any) -> Any:
        for req in batch.reqs:
            req.complete_one()
        tokens = self._next_tokens[: batch.size]
        # As the engine's ForwardOutput, which is unpacked by position.
        return _Output((tokens, tokens, SimpleNamespace(synchronize=lambda: None)))

    def _prepared(self, prepare: Any, batch: Any) -> Any:
        begun = time.process_time_ns()
        prepared = prepare(batch)
        self._inputs_ns = time.process_time_ns() - begun
        return prepared

    def _step(self) -> tuple[dict[str, float], int]:
        self._next_tokens = self._tokens(self._num_rows)
        begun = time.process_time_ns()
        forward_input = self._scheduler._schedule_next_batch()
        data = (forward_input, self._scheduler._forward(forward_input))
        self._scheduler._process_last_data(data)
        spent = time.process_time_ns() - begun
        batch = forward_input.batch
        figures = {"step_us": spent / 1e3, "without_inputs_us": (spent - self._inputs_ns) / 1e3}
        return figures, batch.size if batch.is_decode else 0

    def run(self, variant: str, times: int) -> dict[str, list[float]]:
        with torch.inference_mode():
            return super().run(variant, times)


class _Output(tuple[Any, ...]):
    @property
    def next_tokens_gpu(self) -> torch.Tensor:
        return self[0]


def _common_tokens(first: torch.Tensor, second: torch.Tensor) -> int:
    shorter = min(len(first), len(second))
    differ = (first[:shorter] != second[:shorter]).nonzero()
    return int(differ[0]) if len(differ) else shorter


def _without_pinned_memory() -> None:
    for name in ("empty", "tensor"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *args, make=make, pin_memory=False, **kwargs: make(*args, **kwargs))
    torch.Tensor.pin_memory = lambda self: self
