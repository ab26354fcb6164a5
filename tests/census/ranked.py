"""One rank of the census of groups: `python -m tests.census.ranked RANK SIZE KV_HEADS FOLDER MODEL_TYPE …`.

For each class, the ranks load a tiny model together, and the runner of each computes the trial of the ordinary census
with its part of the heads; the reference is the whole model in the same process. Rank 0 prints a JSON object per class.
If KV_HEADS is not 0, it is the number of the models' KV heads.
Owns the order of one class and its process groups, which meet through files in FOLDER.
"""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from gpu_worker.backends import runner_of
from gpu_worker.checkpoint.files import ModelRefused, read_files
from gpu_worker.checkpoint.linear import PackedLinear, can_pack
from gpu_worker.checkpoint.loading import load_weights
from gpu_worker.compatibility.independence import pin
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.memory.model_facts import examine
from gpu_worker.process.ranks import Ranks
from gpu_worker.sharding.plan import part_of, plan_hash
from tests.census.case import place_and_line, quiet
from tests.census.hints import HINTS
from tests.census.population import Member, population
from tests.census.reference import Reference
from tests.census.shrink import MAX_LENGTH, tiny_config
from tests.census.trial import geometry_for, run_trial
from tests.census.weights import random_eager

# A rank that failed alone leaves the other in a collective call.
_CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One class on several ranks: `equal`, `equal, attention whole`, `refused` or `wrong`; and details."""

    model_type: str
    result: str
    detail: str
    plan: str = ""


def config_of(member: Member, kv_heads: int) -> PreTrainedConfig:
    """The class's tiny config; kv_heads: how many KV heads, 0 for as many as in the ordinary census.

    Latent attention has as many as query heads.
    """
    config = tiny_config(member.config_class, HINTS.get(member.model_type, {}))
    if kv_heads and not hasattr(config.get_text_config(), "kv_lora_rank"):
        config.get_text_config().num_key_value_heads = kv_heads
    return config


def run_shared(member: Member, ranks: Ranks, folder: Path, kv_heads: int) -> Shared:
    """Runs one class. Never raises."""
    name = member.model_type
    try:
        config = config_of(member, kv_heads)
        packs = can_pack(torch.device("cpu"), torch.float32)
        whole = examine(config, dtype=torch.float32, packs=packs)
        part = part_of(config, whole, ranks, dtype=torch.float32, packs=packs)
    except ModelRefused as error:
        return Shared(model_type=name, result="refused", detail=str(error))
    own, plan = part.facts, part.plan
    eager = random_eager(config, torch.float32)
    saved = folder / name
    if ranks.is_leader:
        eager.save_pretrained(saved)
        config.save_pretrained(saved)
    store = dist.FileStore(str(folder / f"{name}.store"), ranks.size)
    timeout = timedelta(seconds=_CALL_SECONDS)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
    try:
        dist.barrier()
        files = read_files(saved)
        cpu = torch.device("cpu")
        model = load_weights(files, device=cpu, dtype=torch.float32, merged=own.merged, shared=plan)
        geometry = geometry_for(MAX_LENGTH)
        pin(model, geometry.max_length)
        runner = runner_of(model, own.layers, geometry, device=torch.device("cpu"), dtype=torch.float32)
        runner.warm_up()
        check_runner(model, runner, torch.float32, unbounded=own.layers)
        verdict = run_trial(model, runner, Reference(eager, max_length=MAX_LENGTH))
    except Exception as error:
        detail = f"{type(error).__name__} at {place_and_line(error)}"
        return Shared(model_type=name, result="wrong", detail=detail, plan=plan_hash(eager, plan))
    finally:
        dist.destroy_process_group()
    packed = sum(isinstance(module, PackedLinear) for module in model.modules())
    splits = any(
        mine.kind.num_heads < all_.kind.num_heads
        for mine, all_ in zip(own.layers.layers, whole.layers.layers, strict=True)
    )
    share = own.costs.weights / whole.costs.weights
    return Shared(
        model_type=name,
        result="equal" if splits else "equal, attention whole",
        detail=f"errors are {verdict.ratio:.2f} of what is allowed; {share:.0%} of the weights on each rank; "
        f"{packed} linear layers packed",
        plan=plan_hash(eager, plan),
    )


def main() -> None:
    """See the module's docstring."""
    rank, size, kv_heads, folder, *names = sys.argv[1:]
    ranks = Ranks(rank=int(rank), size=int(size), local_rank=int(rank), local_size=int(size))
    quiet()
    torch.set_num_threads(1)
    for member in population(*names):
        shared = run_shared(member, ranks, Path(folder), int(kv_heads))
        if ranks.is_leader:
            print(json.dumps(asdict(shared)), flush=True)


if __name__ == "__main__":
    main()
