"""Uploads the masks of a step's constrained rows.

Owns the memory for it: on a GPU pinned buffers, one more than plans in flight, so that a copy waits for nothing; a
buffer is reused when its copy has ended. On a CPU the tensor shares the memory of the masks.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# One more than plans in flight.
_NUM_BUFFERS = 3


class MaskUpload:
    """The masks of one step after another."""

    def __init__(self, device: torch.device, *, max_rows: int, mask_words: int) -> None:
        """mask_words: int32 words of a row's mask."""
        self._device = device
        self._next = 0
        on_gpu = device.type == "cuda"
        num = _NUM_BUFFERS if on_gpu else 1
        shape = (max_rows, mask_words)
        self._hosts = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(num)]
        self._events: list[torch.cuda.Event | None] = [None] * num
        self._on_device = torch.zeros(shape, dtype=torch.int32, device=device) if on_gpu else None

    def upload(self, num_rows: int, write: Callable[[NDArray[np.int32]], None]) -> Tensor:
        """Returns the masks of `num_rows` rows as uint8 [rows, bytes], valid until the next call.

        write: writes int32 [rows, words].
        """
        host = self._hosts[self._next][:num_rows]
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        write(host.numpy())
        if self._on_device is None:
            return host.view(torch.uint8)
        masks = self._on_device[:num_rows]
        masks.copy_(host, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._hosts)
        return masks.view(torch.uint8)
