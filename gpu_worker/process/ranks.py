"""A process's place in a worker group: the processes that share one model, one per device.

Owns the reading of the variables that torchrun sets. Imports no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tandem_contract.plural import numbered

# Torchrun's name for the group; that of our launcher contains its process's number.
RUN_VARIABLE, RUN_PREFIX = "TORCHELASTIC_RUN_ID", "tandem-"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class NotInGroup(ValueError):
    """The variables of torchrun are missing or do not fit the setting `ranks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank 0 is the leader: it alone talks to the scheduler."""

    rank: int
    size: int
    # Among the processes of this host.
    local_rank: int
    local_size: int

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def is_group(self) -> bool:
        return self.size > 1

    @property
    def spans_hosts(self) -> bool:
        return self.local_size < self.size

    def shares_host(self, rank: int) -> bool:
        """Whether that rank is on this host. Torchrun numbers the ranks of a host one after another."""
        first = self.rank - self.local_rank
        return first <= rank < first + self.local_size


SINGLE = Ranks(rank=0, size=1, local_rank=0, local_size=1)


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started this process."""
    return all(name in environment for name in _VARIABLES)


def ranks_of(size: int, environment: Mapping[str, str] = os.environ) -> Ranks:
    """This process's place in a group of `size` ranks. Raises NotInGroup."""
    if size == 1:
        return SINGLE
    try:
        rank, world_size, local_rank, local_size = (int(environment[name]) for name in _VARIABLES)
    except (KeyError, ValueError) as error:
        raise NotInGroup(f"ranks is {size} and torchrun's variable {error} is missing or no number") from error
    if world_size != size:
        raise NotInGroup(
            f"ranks is {size} and torchrun has started {numbered(world_size, 'process')} (WORLD_SIZE); make both equal"
        )
    if not 0 <= local_rank < local_size or not 0 <= rank < size:
        raise NotInGroup(f"torchrun's variables contradict each other: rank {rank} of {size}, {local_rank} here")
    return Ranks(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def group_name(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this process's group on this host: the port of its store, and torchrun's run id."""
    return f"{environment.get('MASTER_PORT', '')}-{environment.get(RUN_VARIABLE, '')}"


def pid_of(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> int:
    """The process that stands for this worker: the launcher of a group on one host, with which all ranks end."""
    prefix, launcher = RUN_PREFIX, environment.get(RUN_VARIABLE, "")
    is_ours = ranks.is_group and launcher.startswith(prefix) and launcher.removeprefix(prefix).isdigit()
    return int(launcher.removeprefix(prefix)) if is_ours else os.getpid()
