"""The table of memory in the log: bytes planned before loading, and bytes measured after it.

Knows nothing of how memory is measured.
"""

from dataclasses import dataclass

from gpu_worker.memory.costs import MAX_GRAPHS
from gpu_worker.memory.pool import WHY_CAPPED
from gpu_worker.memory.sizes import Sizes, readable

_NAME_WIDTH, _FIGURE_WIDTH = 40, 12


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
    geometry = sizes.geometry
    left = sizes.free - sizes.weights - sizes.step - sizes.graphs - sizes.tables - sizes.pool - sizes.beside_pool
    saved: list[tuple[str, int, int | None]] = []
    if geometry.host_pages:
        where = "" if place == "cpu" else ", in host memory"
        saved = [(f"saved KV, {geometry.host_pages} pages{where}", sizes.host_pool, measured and measured.host_pool)]
        left -= sizes.host_pool if place == "cpu" else 0
    standbys: list[tuple[str, int, int | None]] = []
    if sizes.standbys:
        standbys = [("for standby workers", sizes.standbys, None)]
        left -= sizes.standbys
    beside: list[tuple[str, int, int | None]] = []
    if sizes.beside_pool:
        beside = [("beside the shared pool, for a takeover", sizes.beside_pool, None)]
    graphs: list[tuple[str, int, int | None]] = []
    if sizes.graphs or (measured and measured.num_graphs):
        number = f"at most {MAX_GRAPHS}" if measured is None else f"{measured.num_graphs} of at most {MAX_GRAPHS}"
        graphs = [(f"graphs, {number}", sizes.graphs, measured and measured.graphs)]
    pages = f"KV, {geometry.num_pages - 1} pages of {geometry.page_size} tokens"
    items: list[tuple[str, int, int | None]] = [
        (f"weights, {dtype}", sizes.weights, measured and measured.weights),
        (f"step, {geometry.token_budget} tokens, {geometry.max_rows} rows", sizes.step, measured and measured.step),
        *graphs,
        ("tables and buffers", sizes.tables, measured and measured.tables),
        (f"{pages}{', capped' if sizes.is_capped else ''}", sizes.pool, measured and measured.pool),
        *beside,
        *saved,
        *standbys,
        (f"free, {readable(sizes.reserve)} of it kept", left, measured and measured.free),
    ]
    lines = [_line(f"memory on {place}", "planned", "" if measured is None else "measured")]
    for name, planned, found in items:
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
