"""The cards that kernels are checked for: their limits, and the free memory that sizes are chosen for.

Owns these figures. Imports no torch, so that the process that runs the tests needs none.
"""

from dataclasses import dataclass

KIB, GIB = 1 << 10, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One kind of CUDA card. Limits of a multiprocessor are those of the CUDA programming guide, table 30."""

    key: str
    # As torch.cuda.get_device_name gives it.
    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    total_memory: int
    # Free before weights are loaded, beside the CUDA context.
    free_memory: int
    # Shared memory that one block may request, and that a multiprocessor has; each block takes 1 KiB more.
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    l2_bytes: int

    @property
    def sm(self) -> int:
        """The capability as compilers write it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]


H200 = Card(
    key="h200",
    name="NVIDIA H200",
    capability=(9, 0),
    num_multiprocessors=132,
    total_memory=150_754_820_096,
    free_memory=139 * GIB,
    shared_per_block=227 * KIB,
    shared_per_multiprocessor=228 * KIB,
    threads_per_multiprocessor=2048,
    blocks_per_multiprocessor=32,
    l2_bytes=50 << 20,
)
A10G = Card(
    key="a10g",
    name="NVIDIA A10G",
    capability=(8, 6),
    num_multiprocessors=80,
    total_memory=22 * GIB,
    free_memory=21 * GIB,
    shared_per_block=99 * KIB,
    shared_per_multiprocessor=100 * KIB,
    threads_per_multiprocessor=1536,
    blocks_per_multiprocessor=16,
    l2_bytes=6 << 20,
)
RTX_4090 = Card(
    key="rtx4090",
    name="NVIDIA GeForce RTX 4090",
    capability=(8, 9),
    num_multiprocessors=128,
    total_memory=24 * GIB,
    free_memory=23 * GIB,
    shared_per_block=99 * KIB,
    shared_per_multiprocessor=100 * KIB,
    threads_per_multiprocessor=1536,
    blocks_per_multiprocessor=24,
    l2_bytes=72 << 20,
)
CARDS = {card.key: card for card in (H200, A10G, RTX_4090)}
