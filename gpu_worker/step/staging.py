"""A step's host arrays on the device, in one copy.

Owns the ring of pinned host buffers, one longer than the plans in flight, each reused only after its event. Knows
nothing of what the arrays mean. On a CPU the arrays are the tensors.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST_WORDS = 1 << 14


class Staging:
    """Uploads named arrays as int64 tensors; the device's copy lives until the next upload in stream order."""

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._next = 0
        self._hosts: list[Tensor | None] = [None] * num_buffers
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._on_device = torch.zeros(0 if device.type == "cpu" else _LEAST_WORDS, dtype=torch.int64, device=device)

    def upload(self, arrays: Mapping[str, NDArray[np.int64]]) -> dict[str, Tensor]:
        """Each array, same shape, on the device."""
        if self._device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        total = sum(array.size for array in arrays.values())
        if total > self._on_device.numel():
            self._on_device = torch.zeros(1 << total.bit_length(), dtype=torch.int64, device=self._device)
        host = self._free_host_buffer(total)
        words = host.numpy()
        views: dict[str, Tensor] = {}
        offset = 0
        for name, array in arrays.items():
            words[offset : offset + array.size] = array.reshape(-1)
            views[name] = self._on_device[offset : offset + array.size].view(array.shape)
            offset += array.size
        self._on_device[:total].copy_(host[:total], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._hosts)
        return views

    def _free_host_buffer(self, total: int) -> Tensor:
        event, host = self._events[self._next], self._hosts[self._next]
        if event is not None:
            event.synchronize()
        if host is None or host.numel() < total:
            size = max(_LEAST_WORDS, 1 << total.bit_length())
            host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
            self._hosts[self._next] = host
        return host
