"""The collective calls of a worker group, besides those of the model itself.

Owns the process groups of torch.distributed: one for the model on the devices, one of gloo for decisions of the hosts.
All ranks make the same calls in the same order; a rank that fails ends its process, which ends the group (`launch.py`).
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_worker.group.words import STORE_VARIABLE
from gpu_worker.process.ranks import Ranks

# Loading may differ between ranks by as much.
START_SECONDS = 600.0


class Collectives:
    """What the ranks of one group decide together (`start.Together`)."""

    is_group = True

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Waits until all ranks are here. Raises RuntimeError if they are not after START_SECONDS."""
        self.ranks, self._device = ranks, device
        timeout = timedelta(seconds=START_SECONDS)
        # Torch names some groups by numbers.
        self._hosts: Any
        place: dict[str, Any] = {}
        if path := os.environ.get(STORE_VARIABLE):
            place = {"store": dist.FileStore(path, ranks.size), "rank": ranks.rank, "world_size": ranks.size}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", timeout=timeout, device_id=device, **place)
            self._hosts = dist.new_group(backend="gloo", timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout, **place)
            self._hosts = dist.group.WORLD

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value over the ranks."""
        found = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._hosts)
        return [int(value) for value in found]

    def of_leader(self, value: float) -> float:
        """The leader's value, on every rank."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(found, 0, group=self._hosts)
        return float(found)

    def share_tokens(self, tokens: Tensor) -> None:
        """Overwrites the tokens with the leader's, in the stream of the step.

        Logits may differ between ranks in the last bit, and then a draw; the next step must not.
        """
        dist.broadcast(tokens, 0)
