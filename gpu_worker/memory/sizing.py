"""Chooses sizes that fit from settings and memory figures, or refuses with the value that would fit.

Owns the sum of a worker's memory, the arithmetic of its KV pool and of the pages of host memory to which KV is swapped
out, the defaults by device, and the table of the chosen sizes in the log, planned and measured. Every figure is an
argument. Knows nothing of torch, models or sockets. `README.md` says what standby workers take.
"""

from dataclasses import dataclass, replace
from typing import NoReturn

from gpu_worker.attention.host_pages import Passing
from gpu_worker.geometry import (
    MAX_HOST_PAGES,
    MAX_PAGE_IDS,
    PAGES_AT_ONCE,
    Geometry,
    align_up,
    default_chunk_align,
    default_max_rows,
    num_first_pages,
)
from gpu_worker.memory.costs import CPU_RESERVE_BYTES, GPU_RESERVE_BYTES, MAX_GRAPHS, Costs
from gpu_worker.settings import WorkerSettings
from tandem_contract.plural import numbered

WHY_CAPPED = "K (or V) of one layer must have fewer than 2^31 elements, or its decode kernel does not compile for a GPU"
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_NAME_WIDTH, _FIGURE_WIDTH = 40, 12
DEFAULT_CPU_POOL_BYTES = 1 << 30
# The memory of a CUDA process, before it allocates anything: its context, kernels and libraries.
GPU_CONTEXT_BYTES = 512 << 20
# By how much free memory may differ from one start to the next, as a part of the pool's pages.
_HELD_SHARE = 0.02
# Significant bits of the number of pages that fit the memory of a GPU, rounded down. Its kernels are compiled for one
# number, and free memory differs by some megabytes from start to start: with every page counted a start compiled what
# the one before had compiled, which took half of it.
_PAGES_BITS = 8


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


class DoesNotFit(ValueError):
    """The configured size does not fit; the message names the value that would fit."""


def check_host_memory(costs: Costs, free_host: int) -> None:
    """Raises DoesNotFit if the weights exceed free host memory, through which weights for a GPU may have to pass."""
    if costs.weights > free_host:
        raise DoesNotFit(
            f"weights take {readable(costs.weights)} in {costs.dtype}, and without the package accelerate they are "
            f"loaded through host memory, where {readable(free_host)} are free; install accelerate"
        )


def choose_sizes(
    settings: WorkerSettings,
    costs: Costs,
    machine: Machine,
    reach: tuple[int, int] = (0, 0),
    *,
    captures: bool = False,
) -> Sizes:
    """Sizes from the settings, and defaults from the model and free memory.

    reach: `LayerMap.reach`, because a sequence with a window holds few pages at once; captures: whether steps will be
    captured as graphs. Raises DoesNotFit if more memory would help, else ValueError.
    """
    return _Choice(settings, costs, machine, reach, captures=captures).made()


class _Choice:
    """One choice, checked in this order: limits, weights, standby workers, step, host memory, pool, length."""

    def __init__(
        self, settings: WorkerSettings, costs: Costs, machine: Machine, reach: tuple[int, int], *, captures: bool
    ) -> None:
        self.settings, self.costs, self.machine, self.reach, self.captures = settings, costs, machine, reach, captures
        self.free, self.place = machine.free, machine.place
        self.on_cpu = on_cpu = machine.place == "cpu"
        self.host_pool, self.buffers, self.is_capped = 0, 0, False
        # On a CPU pages of 64 and 128 tokens are equally fast and 256 is slower; smaller pages waste less.
        self.page_size = settings.page_size or (64 if on_cpu else 128)
        self.max_rows = settings.max_rows or default_max_rows(on_cpu=on_cpu)
        self.chunk_align = default_chunk_align(on_cpu=on_cpu)
        # K and V of all layers in one page.
        self.page_bytes = self.page_size * costs.kv_per_token
        # The most pages that plans can name and, on a GPU, that kernels can address.
        self.max_pages = MAX_PAGE_IDS if on_cpu else min(MAX_PAGE_IDS, costs.addressable_pages(self.page_size))
        self.token_budget = settings.token_budget or max(self.max_rows + self.chunk_align, 512 if on_cpu else 4096)
        self.length = settings.max_length or costs.default_length
        default = CPU_RESERVE_BYTES if on_cpu else GPU_RESERVE_BYTES
        self.reserve = default if settings.keep_free_bytes is None else settings.keep_free_bytes
        # Its pool gets the memory of the serving worker's, which keeps as much free.
        self.waits = machine.shares_pool and settings.standby_pages is not None
        if self.waits:
            self.reserve = 0

    def made(self) -> Sizes:
        costs, limit = self.costs, self.costs.length_limit
        if self.length > limit:
            raise ValueError(f"max_length is {self.length}; the model's limit is {limit}")
        # Sizes that contradict each other are refused before their memory is computed.
        self.widest = Geometry(
            page_size=self.page_size,
            num_pages=2,
            max_rows=self.max_rows,
            max_length=self.length,
            token_budget=self.token_budget,
            chunk_align=self.chunk_align,
            vocab_size=costs.vocab_size,
        )
        if costs.weights > self.free:
            smaller = self._smaller_dtype(self.free) or "use a smaller model, or more memory"
            raise DoesNotFit(
                f"weights take {readable(costs.weights)} in {costs.dtype}; {readable(self.free)} are free on "
                f"{self.place}; {smaller}"
            )
        self.step, self.graphs, self.tables = self._beside(self.widest)
        self.beside_pool = bytes_beside_pool(costs, self.widest) if self.machine.shares_pool else 0
        of_one = costs.weights + self.step + self.graphs + self.tables + self.beside_pool
        self.of_standby = of_one + (0 if self.on_cpu else GPU_CONTEXT_BYTES)
        self.standbys = self.settings.standbys * self.of_standby
        self.room = self.free - of_one - self.standbys - self.reserve
        least, with_theirs = self._pool_bytes(2), self.room + self.standbys
        if self.room < least <= with_theirs:
            raise DoesNotFit(
                f"standbys is {self.settings.standbys}, and each standby worker takes {readable(self.of_standby)} "
                f"beside its pool: {self._breakdown()}; standbys {(with_theirs - least) // self.of_standby} would fit"
            )
        if self.room < (0 if self.waits else least):
            self._refuse_step()
        host_pages = self._host_pages()
        num_pages = self._num_pages()
        max_length = self.length if self._held_pages() < num_pages else (num_pages - 1) * self.page_size
        if max_length < (self.settings.max_length or 0):
            self._refuse_length(num_pages)
        geometry = replace(self.widest, num_pages=num_pages, max_length=max_length, host_pages=host_pages)
        step, graphs, tables = self._beside(geometry)
        return Sizes(
            geometry=geometry,
            weights=costs.weights,
            step=step,
            graphs=graphs,
            tables=tables + self.buffers,
            pool=self._pool_bytes(num_pages),
            host_pool=self.host_pool,
            reserve=self.reserve,
            standbys=self.standbys,
            beside_pool=self.beside_pool,
            free=self.free,
            is_capped=self.is_capped,
        )

    def _beside(self, geometry: Geometry) -> tuple[int, int, int]:
        """Bytes of a step, of captured graphs, and of tables without buffers."""
        graphs = self.costs.graphs(geometry, on_cpu=self.on_cpu) if self.captures else 0
        return self.costs.step(geometry), graphs, self.costs.tables(geometry)

    def _pool_bytes(self, num_pages: int) -> int:
        """Bytes of a pool of `num_pages`, with the additional pages of learned sinks."""
        return self.page_size * self.costs.learned_sinks_per_token + num_pages * self.page_bytes

    def _fitting(self, num_bytes: int) -> int:
        """Pages of the largest pool that fits `num_bytes`."""
        return max(0, (num_bytes - self._pool_bytes(0)) // self.page_bytes)

    def _num_pages(self) -> int:
        num_pages, pool_bytes = self.settings.num_pages, self.settings.pool_bytes
        if (of_serving := self.settings.standby_pages) is not None:
            if self.on_cpu or self.waits:
                return min(of_serving, self.max_pages)
            return self._configured_pages(of_serving, None)
        if num_pages is not None or pool_bytes is not None:
            return self._configured_pages(num_pages, pool_bytes)
        automatic = self.room
        if not (self.on_cpu or self.machine.shares_pool):
            # Each standby worker has a pool of its own from its start.
            automatic //= 1 + self.settings.standbys
        if self.on_cpu and self.settings.keep_free_bytes is None:
            automatic = min(self.room, max(DEFAULT_CPU_POOL_BYTES, self._pool_bytes(2)))
        fitting = self._fitting(automatic)
        if not self.on_cpu:
            fitting -= fitting % (1 << max(0, fitting.bit_length() - _PAGES_BITS))
        # By default no more pages than all rows need at full length.
        num_pages = min(self.max_rows * self._pages() + 1, fitting)
        self.is_capped = not self.on_cpu and num_pages > self.max_pages
        num_pages, held = min(num_pages, self.max_pages), self.machine.held_pages
        # The same number as the dead worker had, so that its pool can be taken over.
        return held if abs(held - num_pages) <= _HELD_SHARE * num_pages else num_pages

    def _configured_pages(self, num_pages: int | None, pool_bytes: int | None) -> int:
        """Pages of a pool with the size of one of the two settings."""
        asked = f"num_pages is {num_pages}"
        if num_pages is None:
            assert pool_bytes is not None
            num_pages = self._fitting(pool_bytes)
            asked = f"pool_bytes is {pool_bytes} ({numbered(num_pages, 'page')})"
            if num_pages < 2:
                raise ValueError(
                    f"pool_bytes is {pool_bytes}, which is too small; the minimum is two pages of "
                    f"{numbered(self.page_bytes, 'byte')}: pool_bytes "
                    f"{settable(self._pool_bytes(2), at_least=True)} would fit"
                )
            if self.on_cpu:
                num_pages = min(num_pages, self.max_pages)
        most, need = min(self.max_pages, self._fitting(self.room)), self._pool_bytes(num_pages)
        would = f"pool_bytes {settable(self._pool_bytes(most))} or num_pages {most} would fit"
        if num_pages > self.max_pages and not self.on_cpu:
            raise DoesNotFit(f"{asked}; {WHY_CAPPED}: {would}")
        if need > self.room:
            raise DoesNotFit(f"{asked}, which does not fit ({readable(need)}): {self._breakdown()}; {would}")
        return num_pages

    def _host_pages(self) -> int:
        """Pages of host memory. Their buffers, and on a CPU the pages themselves, reduce the room for the pool."""
        asked, page = self.settings.host_pool_bytes, self.page_bytes
        if not asked:
            return 0
        if asked < page:
            raise ValueError(
                f"host_pool_bytes is {asked}, less than a page of {numbered(page, 'byte')}; "
                f"set host_pool_bytes to {settable(page, at_least=True)} at least, or to 0"
            )
        num_pages = min(MAX_HOST_PAGES, asked // page)
        buffers = Passing.of(page, num_pages, on_cpu=self.on_cpu).num_bytes(page)
        room, free_host = self.room - self._pool_bytes(2), self.machine.free_host
        if self.on_cpu:
            fits, because = room - buffers, self._breakdown()
        else:
            fits = free_host - CPU_RESERVE_BYTES
            because = f"of {readable(free_host)} free in host memory, {readable(CPU_RESERVE_BYTES)} are kept free"
            if buffers > room:
                fits, because = 0, f"its buffers take {readable(buffers)}, and {self._breakdown()}"
        if num_pages * page > fits:
            raise DoesNotFit(
                f"host_pool_bytes {readable(asked)} does not fit: {because}; "
                f"host_pool_bytes {settable(fits if fits >= page else 0)} would fit"
            )
        self.host_pool, self.buffers = num_pages * page, buffers
        self.room -= self.buffers + (self.host_pool if self.on_cpu else 0)
        return num_pages

    def _pages(self) -> int:
        return align_up(self.length, self.page_size) // self.page_size

    def _held_pages(self) -> int:
        """The most pages that one sequence holds: with a window, those that a query tile sees and one to write."""
        window, sink_tokens = self.reach
        if not window:
            return self._pages()
        of_sink_tokens = align_up(sink_tokens, self.page_size) // self.page_size
        return min(self._pages(), of_sink_tokens + (window + self.chunk_align - 1) // self.page_size + 2)

    def _breakdown(self) -> str:
        host = f", swapped-out pages {readable(self.host_pool)}" if self.host_pool and self.on_cpu else ""
        graphs = f", captured graphs {readable(self.graphs)}" if self.graphs else ""
        standbys = f", standby workers {readable(self.standbys)}" if self.settings.standbys else ""
        return (
            f"of {readable(self.free)} free on {self.place}, weights take {readable(self.costs.weights)}, a step "
            f"{readable(self.step)}{graphs}, tables {readable(self.tables + self.buffers)}{host}{standbys}, and "
            f"{readable(self.reserve)} are kept free"
        )

    def _smaller_dtype(self, room: int) -> str:
        if self.costs.smaller_weights is None or self.costs.smaller_weights[1] > room:
            return ""
        return f"dtype {self.costs.smaller_weights[0]} would take {readable(self.costs.smaller_weights[1])}"

    def _fits(self, max_rows: int, token_budget: int) -> bool:
        smaller = replace(self.widest, max_rows=max_rows, token_budget=token_budget)
        return self.free >= self.costs.weights + sum(self._beside(smaller)) + self.reserve + self._pool_bytes(2)

    def _refuse_step(self) -> NoReturn:
        """Two pages do not fit beside a step; proposes fewer tokens or rows, less kept free, or smaller weights."""
        least, rows = self.max_rows + self.chunk_align, self.max_rows
        budgets = range(self.token_budget - self.token_budget % self.chunk_align, least - 1, -self.chunk_align)
        budget = next((value for value in (*budgets, least) if self._fits(rows, value)), None)
        fewer = next((value for value in range(rows, 0, -1) if self._fits(value, value + self.chunk_align)), None)
        if budget is not None:
            would = f"token_budget {budget} would fit"
        elif fewer is not None:
            would = f"max_rows {fewer} with token_budget {fewer + self.chunk_align} would fit"
        elif self.room + self.reserve >= self._pool_bytes(2):
            would = f"keep_free_bytes {settable(self.room + self.reserve - self._pool_bytes(2))} would fit"
        else:
            smaller = self._smaller_dtype(self.room + self.costs.weights - self._pool_bytes(2))
            would = smaller or "use a smaller model, or more memory"
        raise DoesNotFit(
            f"two pages of {numbered(self.page_size, 'token')} do not fit beside "
            f"a step of token_budget {self.token_budget} and max_rows {self.max_rows}: {self._breakdown()}; {would}"
        )

    def _refuse_length(self, num_pages: int) -> NoReturn:
        pages = self._held_pages() + 1
        need, fits = self._pool_bytes(pages), (num_pages - 1) * self.page_size
        asked = f"max_length is {self.length}, which needs num_pages {pages} or pool_bytes "
        asked += f"{settable(need, at_least=True)}; the pool has {numbered(num_pages, 'page')}"
        if pages > self.max_pages:
            raise DoesNotFit(f"{asked} and {WHY_CAPPED}; max_length {self._longest()} would fit")
        if need <= self.room:
            raise ValueError(f"{asked}; a larger pool, or max_length {fits}, would fit")
        raise DoesNotFit(f"{asked}, and {self._breakdown()}; max_length {self._longest()} would fit")

    def _longest(self) -> int:
        """The length of one sequence that fills the largest pool."""
        return (min(self.max_pages, self._fitting(self.room)) - 1) * self.page_size


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
    for is_shown, name, planned, used in items:
        if is_shown:
            second = "" if measured is None else "-" if used is None else readable(used)
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


# The granularity of memory of GPUs, so far of all of them.
GRANULE_BYTES = 2 << 20
# First pages begin and end within a granule. Learned sinks have a page of their own in one more, or in two.
_ENDS, _ENDS_OF_SINKS = 1, 2


def bytes_beside_pool(costs: Costs, geometry: Geometry) -> int:
    """What a KV pool of a GPU takes that outlives its worker, beside its pages; the most for any number of them.

    A worker that waits to take a pool over has memory for its first pages; that memory stays free while it has a whole
    pool, because the worker after it needs it. Checksums need sums of a few pages.
    """
    num_pages = num_first_pages(replace(geometry, num_pages=MAX_PAGE_IDS))
    total = 0
    for tensors in costs.pool:
        page_bytes = geometry.page_size * tensors.head_dim * tensors.itemsize
        granules = -(-num_pages * page_bytes // GRANULE_BYTES) + _ENDS + _ENDS_OF_SINKS * bool(tensors.extra_pages)
        total += tensors.count * (tensors.heads * granules * GRANULE_BYTES + (PAGES_AT_ONCE + 1) * page_bytes)
    return total
