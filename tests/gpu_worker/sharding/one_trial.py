"""A rank of a trial's test: `python -m tests.gpu_worker.sharding.one_trial RANK SIZE FOLDER KV_HEADS FAULT`.

The ranks compare the plan of a Llama model. FAULT: `sum`: a projection is half of what it is in the whole model, as if
a rank's part of a sum were taken for all; `gemma3n`: that class, with activations that use mean and deviation of a
dimension that its plan shards. Prints `refused` and why, or what the log says.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma3n import Gemma3nTextConfig

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.memory.model_facts import examine
from gpu_worker.process.ranks import Ranks
from gpu_worker.sharding import trial as trials
from gpu_worker.sharding.plan import part_of
from tests.census.hints import HINTS
from tests.census.shrink import tiny_config


class OverGloo:
    """As `Collectives`."""

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value over the ranks."""
        found = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return [int(value) for value in found]


@torch.no_grad()
def doubled(model: PreTrainedModel) -> PreTrainedModel:
    """The model with twice the first layer's last projection."""
    model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(2)
    return model


def main() -> None:
    """See the module's docstring."""
    rank, size, folder, kv_heads, fault = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    ranks = Ranks(rank=int(rank), size=int(size), local_rank=int(rank), local_size=int(size))
    if fault == "sum":
        right = trials._whole
        trials._whole = lambda *args: doubled(right(*args))
    config: PreTrainedConfig = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=int(kv_heads),
        vocab_size=500,
    )
    if fault == "gemma3n":
        config = tiny_config(Gemma3nTextConfig, HINTS["gemma3n_text"])
    # Not the whole cache: it has the kernels.
    trials.cache_dir = lambda name: Path(folder).parent / name
    cpu = torch.device("cpu")
    whole = examine(config, dtype=torch.float32, packs=False)
    part = part_of(config, whole, ranks, dtype=torch.float32, packs=False)
    try:
        trial = trials.trial_of(config, part.plan_hash, ranks, cpu)
    except ModelRefused as error:
        print("refused", error)
        return
    store = dist.FileStore(str(Path(folder) / "store"), ranks.size)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size)
    try:
        trial.run(ranks, OverGloo().least, cpu)
    except ModelRefused as error:
        print("refused", error)
    sys.stdout.flush()
    # Gloo's threads abort the process now and then if it ends with its group, and this test is of the trial alone.
    os._exit(0)


if __name__ == "__main__":
    main()
