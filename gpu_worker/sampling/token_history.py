"""The tokens of rows with penalties, on the device, because the device has sampled tokens before the host does."""

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry


class TokenHistory:
    """An int32 tensor [rows, max_length]. The place of a token is row * max_length + position."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        places = torch.zeros(geometry.history_places, dtype=torch.int32, device=device)
        self._tokens = places.view(-1, geometry.max_length)

    def write(self, places: Tensor, tokens: Tensor) -> None:
        """Writes tokens to places; both int64 [n]."""
        self._tokens.view(-1).index_copy_(0, places, tokens.int())

    def read(self, rows: Tensor, length: int) -> Tensor:
        """Returns the first `length` tokens of `rows`, int32 [rows, length]; unwritten entries are arbitrary."""
        return self._tokens[:, :length].index_select(0, rows)
