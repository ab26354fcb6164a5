"""A fixed reservation for every sequence, with the slots of the longest one. Owns the size of the reservations.

With a window a reservation is a ring buffer of its length.
"""

from scheduler_svc.simulator.memory.layouts.growing import Growing
from scheduler_svc.simulator.memory.layouts.holes import Holes
from scheduler_svc.simulator.memory.settings import Settings


class Contiguous(Growing):
    """Extents that never need to grow, at multiples of their size."""

    name = "contiguous"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.overhead = self.total % self._span
        self._holes = Holes(self.total - self.overhead)

    def _new_capacity(self, length: int) -> int:
        return self._span

    def largest_hole(self) -> int:
        return self.free
