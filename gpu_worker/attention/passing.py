"""The buffers on the device through which pages pass to and from host memory: their number and size.

Imports no torch, because the choice of sizes counts them before a model is loaded.
"""

from dataclasses import dataclass

# On a GPU two buffers for each direction: one is filled while the other is emptied, and the first pages of a plan do
# not wait for the bus. Fewer passages mean fewer launches, because a passage has one per tensor of the pool.
_GPU_BUFFERS, _GPU_BYTES = 2, 64 << 20
# On a CPU a copy ends before the next begins.
_CPU_BUFFERS, _CPU_BYTES = 1, 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """Buffers of one direction."""

    num_buffers: int
    # Pages that one buffer holds, all layers of each: one passage.
    pages_at_once: int

    @classmethod
    def of(cls, page_bytes: int, host_pages: int, *, on_cpu: bool) -> "Passing":
        """Returns buffers of at least a page and at most the host's pages. page_bytes: K and V of all layers."""
        num_buffers, num_bytes = (_CPU_BUFFERS, _CPU_BYTES) if on_cpu else (_GPU_BUFFERS, _GPU_BYTES)
        return cls(num_buffers=num_buffers, pages_at_once=min(max(1, num_bytes // page_bytes), host_pages))

    def num_bytes(self, page_bytes: int) -> int:
        """Bytes of the buffers of both directions."""
        return 2 * self.num_buffers * self.pages_at_once * page_bytes
