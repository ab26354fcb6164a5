"""What the ranks of a group do together: what they agree on at the start, their sizes, their times, their tokens."""

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from gpu_worker.group.launch import STORE_VARIABLE
from gpu_worker.memory.model_facts import ModelFacts
from gpu_worker.memory.sizing import Sizes
from gpu_worker.process.machine import usable_cpus
from gpu_worker.process.ranks import Ranks
from gpu_worker.step.output import keep_tokens

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

    from gpu_worker.sharding.trial import PlanTrial

# Loading may differ between ranks by as much.
START_SECONDS = 600.0
_SHARED_SIZES = ("num_pages", "host_pages", "max_rows", "max_length", "token_budget")


class Together:
    """What ranks decide together: here what one process does, which decides alone."""

    # Whether there are several.
    is_group = False

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value over the ranks."""
        return list(values)

    def of_leader(self, value: float) -> float:
        """The leader's value, on every rank."""
        return value

    def share_tokens(self, tokens: Tensor) -> None:
        """Overwrites the tokens with the leader's, in the stream of the step."""
        keep_tokens(tokens)


class Collectives(Together):
    """The ranks of one group. All make the same calls in the same order; one that fails ends, and with it the group.

    Owns the process groups of torch.distributed: one for the model on the devices, one of gloo for decisions of hosts.
    """

    is_group = True

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Waits until all ranks are here. Raises RuntimeError if they are not after START_SECONDS."""
        place: dict[str, Any] = {"timeout": timedelta(seconds=START_SECONDS)}
        if path := os.environ.get(STORE_VARIABLE):
            place |= {"store": dist.FileStore(path, ranks.size), "rank": ranks.rank, "world_size": ranks.size}
        # Torch names some groups by numbers.
        self._hosts: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device, **place)
            self._hosts = dist.new_group(backend="gloo", timeout=place["timeout"])
        else:
            dist.init_process_group("gloo", **place)

    def least(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._hosts)
        return [int(value) for value in tensor]

    def of_leader(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(tensor, 0, group=self._hosts)
        return float(tensor)

    def share_tokens(self, tokens: Tensor) -> None:
        """As `Together`. Logits may differ between ranks in the last bit, and then a draw; the next step must not."""
        dist.broadcast(tokens, 0)


def part_of_rank(
    config: PreTrainedConfig, whole: ModelFacts, ranks: Ranks, dtype: torch.dtype, device: torch.device, *, packs: bool
) -> "tuple[ModelFacts, DistributedConfig | None, PlanTrial | None]":
    """What this rank holds of the model, the plan by which it is shared, and its trial if none is known to be right.

    packs: linear layers will be packed. Raises ModelRefused.
    """
    if not ranks.is_group:
        return whole, None, None
    from gpu_worker.sharding.plan import part_of, proven
    from gpu_worker.sharding.trial import trial_of

    part = part_of(config, whole, ranks, dtype=dtype, packs=packs)
    is_proven = part.plan_hash in proven().values()
    return part.facts, part.plan, None if is_proven else trial_of(config, part.plan_hash, ranks, device)


def device_of_rank(device: torch.device, ranks: Ranks) -> torch.device:
    """The device of this rank: on a GPU the one with its number on this host."""
    if not ranks.is_group or device.type == "cpu":
        return device
    return torch.device(device.type, ranks.local_rank)


def threads_of_rank(ranks: Ranks) -> int:
    """CPU threads of each rank: those of the host, shared."""
    cpus = usable_cpus()
    return max(1, int(cpus.quota or cpus.cores) // ranks.local_size)


def least_sizes(sizes: Sizes, together: Together) -> Sizes:
    """The sizes that every rank has memory for."""
    least = together.least([getattr(sizes.geometry, name) for name in _SHARED_SIZES])
    return replace(sizes, geometry=replace(sizes.geometry, **dict(zip(_SHARED_SIZES, least, strict=True))))
