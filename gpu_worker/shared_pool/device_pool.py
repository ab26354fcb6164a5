"""A KV pool in memory of a GPU that outlives its worker, and the taking over of a dead worker's pool.

Owns the pool's memory on the device, and its header in memory of the holder. Until a plan needs the whole pool, or
takes one over, only the first pages have memory (`README.md`).
"""

import hashlib
import math
import os
import time
from collections.abc import Sequence

import torch

from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry, align_up, num_first_pages
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.cuda_driver import CudaError, DeviceMemoryUsedUp, Driver
from gpu_worker.shared_pool.cuda_region import DeviceRegion, bytes_at, mapped_at_new_addresses
from gpu_worker.shared_pool.guard import pages_begun, pages_read
from gpu_worker.shared_pool.messages import HolderClient, PoolError
from gpu_worker.shared_pool.pool import WorkerPool, layout_of, shapes_of
from gpu_worker.shared_pool.region import header_bytes
from gpu_worker.wire.frames import Plan

# A worker that was killed may still hold its memory for a moment. A step may take 3 s before its worker is given up.
_GROW_SECONDS, _TRY_SECONDS = 2.0, 0.02


class DevicePool(WorkerPool):
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
        self._device, self._driver, self._uuid = device, driver, driver.uuid()
        self._num_first = num_first_pages(geometry)
        self._alignment = granularity = driver.granularity()
        shapes = shapes_of(layers, geometry)
        self._device_bytes = sum(align_up(math.prod(shape) * dtype.itemsize, granularity) for shape in shapes)
        self._region = DeviceRegion(driver, self._device_bytes)
        self._address = self._region.address
        # Another device cannot map the memory.
        layout = hashlib.sha256(layout_of(layers, geometry, dtype) + f"{self._uuid} {granularity}".encode()).digest()
        num_bytes = header_bytes(geometry.num_pages)
        super().__init__(holder, geometry, layout=layout, identity=identity, num_bytes=num_bytes, device=self._uuid)
        self.num_bytes += self._device_bytes
        if is_whole:
            self._allocate()
        else:
            self._region.map_pieces(piece_offsets(shapes, dtype.itemsize, geometry, granularity))
        self.zero()

    @property
    def is_whole(self) -> bool:
        return self._region.is_whole

    def zero(self) -> None:
        """Makes every page zero that has memory."""
        for offset, num_bytes in self._region.mapped.items():
            bytes_at(self._region.address + offset, num_bytes, self._device).zero_()
        self._describe()

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """As of any pool. Raises PoolError, too, if the whole pool is needed and has no memory."""
        if not self.is_whole and (not self._region.mapped or self._needs_whole(plan, tables.geometry.page_size)):
            self._grow()
        super().begin_step(plan, tables)

    def _needs_whole(self, plan: Plan, page_size: int) -> bool:
        """Whether the plan may need all pages: it names others than the first ones, or it is for requests.

        The worker's own plans have generation 0, and the first one of a scheduler is a trial of one token.
        """
        if plan.generation and plan.step > 1:
            return True
        return max((*pages_begun(plan, page_size), *pages_read(plan, page_size)), default=0) >= self._num_first

    def _map(self, memories: Sequence[int]) -> None:
        try:
            handle = self._driver.import_from(memories[1])
            try:
                with mapped_at_new_addresses(self._driver, handle, self._device_bytes):
                    pass
                self._wait()
                self._region.replace(handle)
            finally:
                self._driver.release(handle)
        except CudaError as error:
            raise PoolError(f"the pool of a dead worker cannot be mapped: {error}") from error
        super()._map(memories)

    def _grow(self) -> None:
        """Maps the whole pool, with the content of the first pages."""
        self._wait()
        until = time.monotonic() + _GROW_SECONDS
        while True:
            try:
                return self._allocate()
            except CudaError as error:
                if not isinstance(error, DeviceMemoryUsedUp) or time.monotonic() > until:
                    what = f"the KV pool of {self._device_bytes >> 20} MiB cannot be allocated"
                    raise PoolError(f"{what}: {error}") from error
            # Pools that dead workers left and no worker has taken over.
            self._holder.free_unused(self._uuid)
            time.sleep(_TRY_SECONDS)

    def _allocate(self) -> None:
        """Maps new memory over the whole region, zeroed but for what was mapped before, and lets the holder keep it."""
        handle = self._driver.create(self._device_bytes)
        try:
            with mapped_at_new_addresses(self._driver, handle, self._device_bytes) as address:
                whole = bytes_at(address, self._device_bytes, self._device).zero_()
                for offset, num_bytes in self._region.mapped.items():
                    before = bytes_at(self._region.address + offset, num_bytes, self._device)
                    whole[offset : offset + num_bytes].copy_(before)
                self._wait()
            descriptor = self._driver.export(handle)
            try:
                self._holder.attach(self.pool_id, descriptor, self._device_bytes)
            finally:
                os.close(descriptor)
            self._region.replace(handle)
        finally:
            self._driver.release(handle)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def piece_offsets(
    shapes: Sequence[tuple[int, int, int]], itemsize: int, geometry: Geometry, granularity: int
) -> list[int]:
    """Offsets of the pieces, of one granule each, that hold the first pages of every head.

    Pages of a head are consecutive, heads are not. shapes: (heads, tokens, dimension) of each tensor; one starts in the
    next granule after the one before.
    """
    pieces, start = set[int](), 0
    for heads, tokens, dimension in shapes:
        head_bytes, page_bytes = (count * dimension * itemsize for count in (tokens, geometry.page_size))
        # The page behind the last one is that of learned sinks.
        of_pages, of_sinks = num_first_pages(geometry) * page_bytes, geometry.num_pages * page_bytes
        for first in range(start, start + heads * head_bytes, head_bytes):
            for begin, end in ((first, first + of_pages), (first + of_sinks, first + head_bytes)):
                pieces.update(range(begin // granularity, -(-end // granularity)) if begin < end else ())
        start += align_up(heads * head_bytes, granularity)
    return [granularity * piece for piece in sorted(pieces)]
