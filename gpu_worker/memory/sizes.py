"""What sizes are chosen from, the chosen sizes, and their table in the log, planned and measured.

Figures without arithmetic. Knows nothing of how memory is measured.
"""

from dataclasses import dataclass

from gpu_worker.geometry import Geometry
from gpu_worker.memory.costs import MAX_GRAPHS
from tandem_contract.plural import numbered

WHY_CAPPED = "K (or V) of one layer must have fewer than 2^31 elements, or its decode kernel does not compile for a GPU"
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_NAME_WIDTH, _FIGURE_WIDTH = 40, 12


def readable(num_bytes: int) -> str:
    """A size for a message: 1.5 GiB."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return numbered(num_bytes, "byte")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes after loading; None if the device does not report them."""

    weights: int
    step: int | None
    tables: int | None
    pool: int
    host_pool: int
    free: int
    # The pool of captured graphs, and their number.
    graphs: int = 0
    num_graphs: int = 0


def ledger(sizes: Sizes, place: str, dtype: str, measured: Measured | None = None) -> list[str]:
    """One line per item, with a second column if there are measured figures."""
    geometry, on_cpu = sizes.geometry, place == "cpu"
    left = sizes.free - sizes.weights - sizes.step - sizes.graphs - sizes.tables - sizes.pool - sizes.beside_pool
    left -= sizes.standbys + (sizes.host_pool if on_cpu else 0)
    number = f"at most {MAX_GRAPHS}" if measured is None else f"{measured.num_graphs} of at most {MAX_GRAPHS}"
    has_graphs = sizes.graphs or (measured and measured.num_graphs)
    step = f"step, {numbered(geometry.token_budget, 'token')}, {numbered(geometry.max_rows, 'row')}"
    pages = (
        f"KV, {numbered(geometry.num_pages - 1, 'page')} of "
        f"{numbered(geometry.page_size, 'token')}{', capped' if sizes.is_capped else ''}"
    )
    saved = f"saved KV, {numbered(geometry.host_pages, 'page')}{'' if on_cpu else ', in host memory'}"
    # Whether the line is shown, its name, and bytes planned and measured.
    items: list[tuple[object, str, int, int | None]] = [
        (True, f"weights, {dtype}", sizes.weights, measured and measured.weights),
        (True, step, sizes.step, measured and measured.step),
        (has_graphs, f"graphs, {number}", sizes.graphs, measured and measured.graphs),
        (True, "tables and buffers", sizes.tables, measured and measured.tables),
        (True, pages, sizes.pool, measured and measured.pool),
        (sizes.beside_pool, "beside the shared pool, for a takeover", sizes.beside_pool, None),
        (geometry.host_pages, saved, sizes.host_pool, measured and measured.host_pool),
        (sizes.standbys, "for standby workers", sizes.standbys, None),
        (True, f"free, {readable(sizes.reserve)} of it kept", left, measured and measured.free),
    ]
    lines = [_line(f"memory on {place}", "planned", "" if measured is None else "measured")]
    for is_shown, name, planned, found in items:
        if is_shown:
            second = "" if measured is None else "-" if found is None else readable(found)
            lines.append(_line(f"  {name}", readable(planned), second))
    if measured and (measured.graphs > sizes.graphs or measured.num_graphs > MAX_GRAPHS):
        lines.append("  graphs: more than planned; the difference comes from the memory that is kept free")
    if sizes.beside_pool:
        lines.append("  the shared pool is outside torch's allocator, and the holder keeps it if this worker dies")
    if sizes.is_capped:
        lines.append(f"  capped: {WHY_CAPPED}")
    return lines


def _line(name: str, first: str, second: str) -> str:
    return f"{name:{_NAME_WIDTH}}{first:>{_FIGURE_WIDTH}}{second:>{_FIGURE_WIDTH}}".rstrip()
