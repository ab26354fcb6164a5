"""A rank of a trial's test: `python -m tests.gpu_worker.sharding.one_trial RANK SIZE FOLDER CASE …`.

The ranks compare the plan of a Llama model in each case. CASE: the number of its KV heads; `sum`: a projection is half
of what it is in the whole model, as if a rank's part of a sum were taken for all; `gemma3n`: that class, with
activations that use mean and deviation of a dimension that its plan shards. Prints a line of dashes before each, then
`refused` and why, or what the log says. What is kept of a case is in its own folder.
"""

import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
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

CPU = torch.device("cpu")


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


def config_of(case: str) -> PreTrainedConfig:
    if case == "gemma3n":
        return tiny_config(Gemma3nTextConfig, HINTS["gemma3n_text"])
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=int(case),
        vocab_size=500,
    )


@cache
def trial_of(case: str, ranks: Ranks) -> trials.PlanTrial:
    """Before the ranks meet. Raises ModelRefused."""
    config = config_of(case)
    whole = examine(config, dtype=torch.float32, packs=False)
    part = part_of(config, whole, ranks, dtype=torch.float32, packs=False)
    return trials.trial_of(config, part.plan_hash, ranks, CPU)


def main() -> None:
    """See the module's docstring."""
    rank, size, folder, *cases = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    ranks = Ranks(rank=int(rank), size=int(size), local_rank=int(rank), local_size=int(size))
    found: dict[str, trials.PlanTrial | ModelRefused] = {}
    for case in dict.fromkeys(cases):
        try:
            found[case] = trial_of("4" if case == "sum" else case, ranks)
        except ModelRefused as error:
            found[case] = error
    store = dist.FileStore(str(Path(folder) / "store"), ranks.size)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size)
    right = trials._whole
    for case in cases:
        print("---")
        trials._whole = (lambda *args: doubled(right(*args))) if case == "sum" else right
        # Not the whole cache: it has the kernels.
        trials.cache_dir = lambda name, case=case: Path(folder) / case / name
        try:
            trial = found[case]
            if isinstance(trial, ModelRefused):
                raise trial
            trial.run(ranks, OverGloo().least, CPU)
        except ModelRefused as error:
            print("refused", error)
        # What rank 0 keeps is there before the next case.
        dist.barrier()
    sys.stdout.flush()
    # Gloo's threads abort the process now and then if it ends with its group, and this test is of the trial alone.
    os._exit(0)


if __name__ == "__main__":
    main()
