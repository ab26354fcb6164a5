"""The tokens of rows with penalties, on the device, where sampled tokens are available before the host has them.

Owns that tensor, which is written and read in stream order. Knows nothing of penalties, nor of which rows have some.
"""

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry


class TokenHistory:
    """int32 [rows, max_length]; the place of a row's position is row * max_length + position."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        places = torch.zeros(geometry.history_places, dtype=torch.int32, device=device)
        self._tokens = places.view(-1, geometry.max_length)

    def write(self, places: Tensor, tokens: Tensor) -> None:
        """Writes tokens to places; both int64 [n]."""
        self._tokens.view(-1).index_copy_(0, places, tokens.int())

    def read(self, rows: Tensor, length: int) -> Tensor:
        """The first `length` tokens, int32 [rows, length], of `rows` int64; unwritten entries are arbitrary."""
        return self._tokens[:, :length].index_select(0, rows)
