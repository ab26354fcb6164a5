"""vLLM's V1 scheduler from an unpacked wheel or a checkout: `schedule()` and `update_from_output()`.

Owns its inputs: its own config objects at their defaults, prefix caching on, and the scheduler class that these choose,
with two steps in flight if that class is the asynchronous one, as in its engine core. Faked: the inspection of a model
class, which would load the model's code, and modules that only its server and grammars need.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.measure.schedulers.fakes import SteadyPeer, fake_missing

_VOCAB_SIZE, _EOS = 32_000, 2
# vLLM's default on CUDA.
_BLOCK = 16
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "eos_token_id": _EOS,
    "torch_dtype": "float32",
}
_NOT_NEEDED = (
    "aiohttp",
    "fastapi",
    "llguidance",
    "uvloop",
    "xgrammar",
    "xgrammar.openai_tool_call_schema",
    "xgrammar.structural_tag",
)


class Peer(SteadyPeer):
    """The blocks have 16 tokens; every full block is hashed and cached."""

    def __init__(self, folder: Path, num_rows: int, context: int, num_steps: int) -> None:
        sys.path.insert(0, str(folder))
        os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        fake_missing(_NOT_NEEDED)
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        self._random = random.Random(0)
        self._num_rows = num_rows
        self._output = ModelRunnerOutput
        first = context - num_steps // 2
        longest = first + 64 + 2 * num_steps
        config = _config(num_rows, longest)
        self._scheduler = _scheduler(config, num_rows * (-(-longest // _BLOCK) + 1) + 1)
        self._in_flight: deque[Any] = deque()
        self._most_in_flight = 2 if config.scheduler_config.async_scheduling else 1
        name = type(self._scheduler).__name__
        self.note = f"{name}.schedule() and update_from_output(), {self._most_in_flight} in flight, blocks of {_BLOCK}"
        init_none_hash(sha256)
        hasher = get_request_block_hasher(_BLOCK, sha256)
        for i in range(num_rows):
            prompt = self._tokens(self._random.randint(first - 64, first + 64))
            sampling = SamplingParams(max_tokens=longest - len(prompt))
            sampling.update_from_generation_config({}, _EOS)
            request = Request(f"r-{i}", prompt, sampling, None, block_hasher=hasher)
            self._scheduler.add_request(request)
        while self._step()[1] < num_rows:
            pass

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(_EOS + 1, _VOCAB_SIZE) for _ in range(count)]

    def _step(self) -> tuple[dict[str, float], int]:
        begun = time.process_time_ns()
        while len(self._in_flight) < self._most_in_flight:
            self._in_flight.append(self._scheduler.schedule())
        spent = time.process_time_ns() - begun
        order = self._in_flight.popleft()
        ids = list(order.num_scheduled_tokens)
        output = self._output(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[token] for token in self._tokens(len(ids))],
        )
        begun = time.process_time_ns()
        self._scheduler.update_from_output(order, output)
        spent += time.process_time_ns() - begun
        num_decoding = order.scheduled_cached_reqs.num_reqs if order.total_num_scheduled_tokens == len(ids) else 0
        return {"step_us": spent / 1e3}, num_decoding


def _config(num_rows: int, longest: int) -> Any:
    """Returns its VllmConfig, for a model without weights."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.model_executor.models import registry

    info = {field.name: False for field in fields(registry._ModelInfo)} | {
        "architecture": "LlamaForCausalLM",
        "is_text_generation_model": True,
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supported_video_pruning_methods": (),
    }
    registry._try_inspect_model_cls = lambda *args: registry._ModelInfo(**info)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(_MODEL))
        model_config = ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=longest)
    return VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=min(65_536, num_rows * longest),
            max_model_len=longest,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=_BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )


def _scheduler(config: Any, num_blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = num_blocks
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=_BLOCK,
    )
