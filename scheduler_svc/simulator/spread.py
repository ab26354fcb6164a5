"""Which of several cells a request goes to: by the beginning of its prompt, at random, or to the least loaded.

Owns the choice. That by the beginning is a model of Envoy's with `deploy/envoy.yaml`: a hash of the beginning orders
the cells, and one with more than 1.25 times its share of the live requests is passed over.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from enum import StrEnum

from scheduler_svc.core.messages.arrays import Int32Array

_FIRST_TOKENS = 256
LOAD_FACTOR = 1.25


class Spread(StrEnum):
    """How requests are spread over cells."""

    HASH = "hash"
    RANDOM = "random"
    LEAST = "least"


class Router:
    """Chooses cells of equal size."""

    def __init__(self, spread: Spread, num_cells: int, seed: int) -> None:
        self._spread, self._num_cells = spread, num_cells
        self._rng = random.Random(seed)

    def choose(self, prompt: Int32Array, tenant: int, live: Sequence[int]) -> int:
        """The number of the cell. `live`: the requests that each has and has not ended."""
        if self._num_cells == 1:
            return 0
        if self._spread is Spread.RANDOM:
            return self._rng.randrange(self._num_cells)
        least = min(range(self._num_cells), key=live.__getitem__)
        if self._spread is Spread.LEAST:
            return least
        slots = math.ceil(math.ceil(LOAD_FACTOR * (sum(live) + 1)) / self._num_cells)
        return next((number for number in self._order(prompt, tenant) if live[number] <= slots), least)

    def _order(self, prompt: Int32Array, tenant: int) -> list[int]:
        beginning = hashlib.blake2b(prompt[:_FIRST_TOKENS].tobytes() + tenant.to_bytes(8, "little"), digest_size=8)

        def weight(number: int) -> bytes:
            return hashlib.blake2b(beginning.digest() + number.to_bytes(8, "little"), digest_size=8).digest()

        return sorted(range(self._num_cells), key=weight)
