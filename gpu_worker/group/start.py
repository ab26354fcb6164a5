"""What of a worker's start the ranks of a group do together: their sizes, their times, their tokens.

`Alone` is the same for a worker of one process. Owns the choice between both; imports torch.distributed for a group
only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.memory.model_facts import ModelFacts
from gpu_worker.memory.sizes import Sizes
from gpu_worker.process.cpus import usable_cpus
from gpu_worker.process.ranks import Ranks
from gpu_worker.sampling.shared_tokens import keep_tokens

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

_LEAST_TRANSFORMERS = (5, 23)
_SHARED_SIZES = ("num_pages", "host_pages", "max_rows", "max_length", "token_budget")


class Together(Protocol):
    """What ranks decide together."""

    # Whether there are several.
    is_group: bool

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value over the ranks."""
        ...

    def of_leader(self, value: float) -> float:
        """The leader's value."""
        ...

    def share_tokens(self, tokens: Tensor) -> None:
        """Overwrites the tokens with the leader's."""
        ...


class Alone:
    """One process has nobody to agree with."""

    is_group = False

    def least(self, values: Sequence[int]) -> list[int]:
        """As `Together`."""
        return list(values)

    def of_leader(self, value: float) -> float:
        """As `Together`."""
        return value

    def share_tokens(self, tokens: Tensor) -> None:
        """As `Together`."""
        keep_tokens(tokens)


def meet(ranks: Ranks, device: torch.device) -> Together:
    """Returns when all ranks are here."""
    if not ranks.is_group:
        return Alone()
    from gpu_worker.group.collectives import Collectives

    return Collectives(ranks, device)


def part_of_rank(
    config: PreTrainedConfig, whole: ModelFacts, ranks: Ranks, dtype: torch.dtype, *, packs: bool
) -> tuple[ModelFacts, "DistributedConfig | None"]:
    """What this rank holds of the model, and the plan by which the model is shared. Raises ModelRefused.

    packs: linear layers will be packed.
    """
    if not ranks.is_group:
        return whole, None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _LEAST_TRANSFORMERS:
        raise ModelRefused(
            f"ranks is {ranks.size}; a model is shared by transformers {'.'.join(map(str, _LEAST_TRANSFORMERS))} or "
            f"newer, and {transformers.__version__} is installed"
        )
    from gpu_worker.sharding.twin import part_of

    part = part_of(config, whole, ranks, dtype=dtype, packs=packs)
    return part.facts, part.plan


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
