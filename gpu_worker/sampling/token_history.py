"""The tokens of rows whose penalties depend on them, on the device: sampled ones are there before the host knows them.

Owns that tensor; written and read in stream order. Knows nothing of penalties, nor of which rows have some.
"""

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry


class TokenHistory:
    """int32 [rows, max_length]; a row's place for a position is row * max_length + position."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        places = torch.zeros(geometry.history_places, dtype=torch.int32, device=device)
        self._tokens = places.view(-1, geometry.max_length)

    def write(self, places: Tensor, tokens: Tensor) -> None:
        """Both int64 [n]."""
        self._tokens.view(-1).index_copy_(0, places, tokens.int())

    def read(self, rows: Tensor, length: int) -> Tensor:
        """int32 [rows, length] of int64 [rows]; entries past what was written mean nothing."""
        return self._tokens[:, :length].index_select(0, rows)
