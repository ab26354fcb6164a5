"""What sizes are chosen from, and the sizes: figures without arithmetic."""

from dataclasses import dataclass

from gpu_worker.geometry import Geometry

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def readable(num_bytes: int) -> str:
    """A size for a message: 1.5 GiB."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def settable(num_bytes: int, *, at_least: bool = False) -> str:
    """A size for a setting: 1.5GiB, rounded down, or up if `at_least`."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            tenths = -(-10 * num_bytes // size) if at_least else 10 * num_bytes // size
            return f"{tenths / 10:.1f}{unit}"
    return str(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device, and the bytes that are free before weights are loaded."""

    # The device as settings name it: cpu, cuda:0.
    place: str
    free: int
    # Bytes of host memory, if the device is a GPU.
    free_host: int = 0
    # Whether the KV pool of a GPU outlives its worker, and the pages of a pool that a dead worker left, which count as
    # free.
    shares_pool: bool = False
    held_pages: int = 0

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.place == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The chosen sizes and their bytes."""

    geometry: Geometry
    weights: int
    step: int
    # The memory that captured graphs keep; 0 if steps run without graphs.
    graphs: int
    # Tables, and the buffers through which pages pass to and from host memory.
    tables: int
    pool: int
    # Host memory for pages that are swapped out, which on a CPU is part of the same memory.
    host_pool: int
    # Kept free on purpose.
    reserve: int
    # Free before all of these are allocated.
    free: int
    # Left free for standby workers that start later.
    standbys: int = 0
    # What a shared pool of a GPU takes beside its pages.
    beside_pool: int = 0
    # Whether the pool is smaller than memory and rows allow, because of `WHY_CAPPED`.
    is_capped: bool = False
