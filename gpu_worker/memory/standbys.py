"""Memory for standby workers, which run the same model on the same device.

Each takes weights, a step, graphs and tables beside its pool. On a CPU its pool takes no memory before it is written,
which is after the end of the worker whose place it takes. On a GPU its pool is allocated at its start, unless it is
shared: then it gets the memory of the other worker's pool.
"""

from dataclasses import dataclass

from gpu_worker.memory.pool import DoesNotFit, Pool
from gpu_worker.memory.sizes import readable


@dataclass(frozen=True, slots=True, kw_only=True)
class Standbys:
    """The standby workers that start later, and the bytes that each takes beside its pool."""

    count: int
    each: int
    # Whether each has a pool of its own from its start.
    has_own_pool: bool

    def __str__(self) -> str:
        """A part of a list of what takes memory; empty without standby workers."""
        return f", standby workers {readable(self.num_bytes)}" if self.count else ""

    @property
    def num_bytes(self) -> int:
        """What all of them take beside their pools."""
        return self.count * self.each

    def check_room(self, room: int, pool: Pool, breakdown: str) -> None:
        """Raises DoesNotFit if the smallest pool would fit without them. room: bytes for this worker's pool."""
        least = pool.num_bytes(2)
        if room < least <= room + self.num_bytes:
            fits = (room + self.num_bytes - least) // self.each
            raise DoesNotFit(
                f"standbys is {self.count}, and each standby worker takes {readable(self.each)} beside its pool: "
                f"{breakdown}; standbys {fits} would fit"
            )

    def share_of(self, room: int) -> int:
        """The bytes of `room` for this worker's own pool."""
        return room // (1 + self.count) if self.has_own_pool else room
