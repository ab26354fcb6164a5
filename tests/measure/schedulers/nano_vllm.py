"""nano-vllm's scheduler from a checkout: `schedule()` and `postprocess()`, as its LLMEngine.step calls them.

Owns its inputs. Omitted: the model runner. Faked: `transformers`, which its config only imports.
"""

import random
import time
from pathlib import Path
from types import SimpleNamespace

from tests.measure.schedulers.fakes import SteadyPeer, fake, package

_VOCAB_SIZE, _EOS = 32_000, 2
_BLOCK = 256


class Peer(SteadyPeer):
    """The blocks have 256 tokens, nano-vllm's minimum."""

    note = "schedule() and postprocess() on lists of ids; no message, no plan for another process"

    def __init__(self, folder: Path, num_rows: int, context: int, num_steps: int) -> None:
        # nano-vllm's own __init__ loads the model runner.
        package("nanovllm", folder / "nanovllm")
        fake(["transformers"])
        from nanovllm.engine.scheduler import Scheduler
        from nanovllm.engine.sequence import Sequence
        from nanovllm.sampling_params import SamplingParams

        self._random = random.Random(0)
        blocks_per_row = (context + num_steps + _BLOCK) // _BLOCK + 1
        config = SimpleNamespace(
            max_num_seqs=num_rows,
            max_num_batched_tokens=65_536,
            eos=_EOS,
            kvcache_block_size=_BLOCK,
            num_kvcache_blocks=num_rows * blocks_per_row,
        )
        self._scheduler = Scheduler(config)
        self._num_rows = num_rows
        first = context - num_steps // 2
        for _ in range(num_rows):
            prompt = self._tokens(self._random.randint(first - 64, first + 64))
            self._scheduler.add(Sequence(prompt, SamplingParams(temperature=1.0, max_tokens=10 * num_steps)))
        while self._scheduler.waiting:
            self._step()

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(_EOS + 1, _VOCAB_SIZE) for _ in range(count)]

    def _step(self) -> tuple[dict[str, float], int]:
        tokens = self._tokens(self._num_rows)
        begun = time.process_time_ns()
        sequences, is_prefill = self._scheduler.schedule()
        self._scheduler.postprocess(sequences, tokens, is_prefill)
        us = (time.process_time_ns() - begun) / 1e3
        return {"step_us": us}, 0 if is_prefill else len(sequences)
