"""A KV pool in memory of a GPU that outlives its worker, and the taking over of a dead worker's pool.

Owns the pool's memory on the device, and its header in memory of the holder. Until the worker gets requests, only the
first pages have memory, because the pool of the worker that serves, or that has died, is on the same
card. The whole pool is mapped at the same addresses when a plan needs it, or takes a pool over.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.attention.kv_cache import tensor_shape
from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry, align_up, num_first_pages
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.checksum import DeviceChecksums, words_of
from gpu_worker.shared_pool.cuda_driver import CudaError, Driver
from gpu_worker.shared_pool.cuda_region import DeviceRegion, bytes_at
from gpu_worker.shared_pool.guard import DeviceGuard
from gpu_worker.shared_pool.messages import HolderClient, HolderError, PoolError
from gpu_worker.shared_pool.pool import layout_of
from gpu_worker.shared_pool.region import Header, Region, header_bytes, identity_hash
from gpu_worker.wire.frames import Plan

# A worker that was killed may still hold its memory for a moment. A step may take 3 s before its worker is given up.
_GROW_SECONDS, _TRY_SECONDS = 2.0, 0.02
# Two plans in flight, and one more.
_NUM_BUFFERS = 3


class DevicePool:
    """The pool of one worker on a GPU."""

    def __init__(
        self,
        holder: HolderClient,
        driver: Driver,
        layers: LayerMap,
        geometry: Geometry,
        dtype: torch.dtype,
        *,
        identity: str,
        device: torch.device,
        is_whole: bool,
    ) -> None:
        """Reserves the addresses, and maps new memory: at all of them if `is_whole`, else for the first pages.

        Raises HolderError, CudaError or OSError.
        """
        self._holder, self._device, self._num_pages = holder, device, geometry.num_pages
        self._num_first = num_first_pages(geometry)
        shapes = [
            tensor_shape(layer.kind, num_pages=geometry.num_pages, page_size=geometry.page_size)
            for layer in layers.layers
            for _ in range(2)
        ]
        self._granularity = driver.granularity()
        sizes = [align_up(math.prod(shape) * dtype.itemsize, self._granularity) for shape in shapes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._free_at = 0
        on_device = f"{driver.uuid()} {self._granularity}"
        # Another device cannot map the memory.
        self.layout = hashlib.sha256(layout_of(layers, geometry, dtype) + on_device.encode()).digest()
        self._identity, self._uuid = identity_hash(identity), driver.uuid()
        self._region = DeviceRegion(driver, sum(sizes))
        self._header_bytes = header_bytes(geometry.num_pages)
        self.num_bytes = self._header_bytes + sum(sizes)
        self.pool_id, memory = holder.create(self._header_bytes, device=self._uuid, pages=geometry.num_pages)
        try:
            self._host = Region(memory, self._header_bytes)
        finally:
            os.close(memory)
        self._header = Header(self._host.bytes_at(0, self._header_bytes), geometry.num_pages)
        self._guard = DeviceGuard(self._header, geometry.num_pages)
        if is_whole:
            self._allocate()
        else:
            self._region.map_pieces(
                piece_offsets(shapes, starts, itemsize=dtype.itemsize, geometry=geometry, granularity=self._granularity)
            )
        self.zero()

    @property
    def is_whole(self) -> bool:
        """Whether every page has memory."""
        return self._region.is_whole

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor of the pool. Called for K and V of each layer, in order."""
        num_bytes = math.prod(shape) * dtype.itemsize
        found = bytes_at(self._region.address + self._free_at, num_bytes, device)
        self._free_at += align_up(num_bytes, self._granularity)
        return found.view(dtype).view(shape)

    def zero(self) -> None:
        """Makes every page zero that has memory."""
        for offset, num_bytes in self._region.mapped:
            bytes_at(self._region.address + offset, num_bytes, self._device).zero_()
        self._header.write(pool_id=self.pool_id, layout=self.layout, identity=self._identity)
        self._guard.forget()

    def attach(self, pools: Sequence[Tensor], page_size: int) -> None:
        """Lets the checksums of pages be those of these tensors, which `zeros` returned."""
        self._guard.checksums = DeviceChecksums(words_of(pools, page_size), self._num_pages, num_buffers=_NUM_BUFFERS)
        # Loads the kernels.
        self._guard.checksums.begin([0])

    def begin_generation(self, generation: int) -> None:
        """Plans of this generation follow."""
        self._guard.begin_generation(generation)

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """Called before a step, with its rows and pages in the tables, positions as before it.

        Raises PageDamaged, or PoolError if the whole pool is needed and there is no memory for it.
        """
        if not self.is_whole and (not self._region.mapped or _needs_whole(plan, self._num_first)):
            self._grow()
        self._guard.begin_step(plan, tables)

    def end_step(self, step: int) -> Callable[[], None] | None:
        """Called when the step is enqueued. The function, if there is one, is to be called when it has ended."""
        return self._guard.end_step(step)

    def take_over(self, order: pb.TakeOver) -> None:
        """Replaces the own pool by that of a dead worker, if it is the pool that the order describes.

        Waits for the device. Raises PoolError; this pool is unchanged then.
        """
        header, memory = self._holder.take_device(order.pool_id, self._header_bytes, self._region.num_bytes)
        try:
            data = os.pread(header, self._header_bytes, 0)
            found = Header(bytearray(data), self._num_pages)
            found.check(pool_id=order.pool_id, layout=self.layout, identity=self._identity, generation=order.generation)
            self._map_dead(memory)
            self._host.replace(header)
        except OSError as error:
            raise PoolError(f"the pool of a dead worker cannot be mapped: {error}") from error
        finally:
            os.close(header)
            os.close(memory)
        self._guard.taken_over()
        own, self.pool_id = self.pool_id, order.pool_id
        if own != order.pool_id:
            # If the holder does not answer, it frees the pool when this process ends.
            with suppress(HolderError):
                self._holder.give_back(own)

    def _map_dead(self, memory: int) -> None:
        with self._as_pool_error("the pool of a dead worker cannot be mapped"):
            handle = self._region.import_from(memory)
            try:
                with self._region.elsewhere(handle):
                    pass
                self._wait()
                self._region.replace(handle)
            finally:
                self._region.release(handle)

    def _grow(self) -> None:
        """Maps the whole pool, with the content of the first pages."""
        self._wait()
        with self._as_pool_error(f"the KV pool of {self._region.num_bytes >> 20} MiB cannot be allocated"):
            until = time.monotonic() + _GROW_SECONDS
            while True:
                try:
                    return self._allocate()
                except CudaError as error:
                    if not error.is_out_of_memory or time.monotonic() > until:
                        raise
                # Pools that dead workers left and that nobody has taken over.
                self._holder.free_unused(self._uuid)
                time.sleep(_TRY_SECONDS)

    def _allocate(self) -> None:
        """Maps new memory over the whole region, zeroed but for what was mapped before, and lets the holder keep it."""
        handle = self._region.create()
        try:
            with self._region.elsewhere(handle) as address:
                whole = bytes_at(address, self._region.num_bytes, self._device).zero_()
                for offset, num_bytes in self._region.mapped:
                    before = bytes_at(self._region.address + offset, num_bytes, self._device)
                    whole[offset : offset + num_bytes].copy_(before)
                self._wait()
            descriptor = self._region.export(handle)
            try:
                self._holder.attach(self.pool_id, descriptor, self._region.num_bytes)
            finally:
                os.close(descriptor)
            self._region.replace(handle)
        finally:
            self._region.release(handle)

    def _wait(self) -> None:
        """Waits until no work of the device uses the pool."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _as_pool_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            raise PoolError(f"{what}: {error}") from error


def _needs_whole(plan: Plan, num_first: int) -> bool:
    """Whether the plan may need all pages: it names others than the first ones, or it is for requests.

    The worker's own plans have generation 0, and the first one of a scheduler is a trial of one token.
    """
    if plan.generation and plan.step > 1:
        return True
    orders = plan.page_orders
    named = [plan.append_pages, orders.zeroed, orders.copied_to, orders.copied_from, orders.saved_pages]
    named += [orders.loaded_pages, *(() if plan.started is None else plan.started.pages)]
    return any(pages.size and int(pages.max()) >= num_first for pages in named)


def piece_offsets(
    shapes: Sequence[tuple[int, int, int]],
    starts: Sequence[int],
    *,
    itemsize: int,
    geometry: Geometry,
    granularity: int,
) -> list[int]:
    """Offsets of the pieces, of one granule each, that hold the first pages of every head.

    Pages of a head are consecutive, heads are not. shapes: (heads, tokens, dimension) of each tensor, which starts at
    the byte of `starts`.
    """
    num_pages = num_first_pages(geometry)
    pieces: set[int] = set()
    for shape, start in zip(shapes, starts, strict=True):
        for begin, end in _ranges(shape, start, itemsize, num_pages, geometry):
            pieces.update(range(begin // granularity, -(-end // granularity)))
    return [granularity * piece for piece in sorted(pieces)]


def _ranges(
    shape: tuple[int, int, int], start: int, itemsize: int, num_pages: int, geometry: Geometry
) -> Iterator[tuple[int, int]]:
    """The bytes of each head's first pages, and of the page behind the last one that learned sinks have."""
    heads, tokens, dimension = shape
    head_bytes, page_bytes = (count * dimension * itemsize for count in (tokens, geometry.page_size))
    for head in range(heads):
        first = start + head * head_bytes
        yield first, first + num_pages * page_bytes
        if tokens > geometry.num_pages * geometry.page_size:
            yield first + geometry.num_pages * page_bytes, first + head_bytes
