"""A KV pool in memory that outlives its worker, and the taking over of a dead worker's pool.

Owns the memory's place in this process and which pool it is. `guard.py` owns which pages are whole. Tensors and
recorded kernels point to the region's addresses, so a pool that is taken over is mapped at the same ones.
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.attention.kv_cache import PoolMemory, tensor_shape
from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.checksum import PageChecksums
from gpu_worker.shared_pool.guard import PageGuard
from gpu_worker.shared_pool.messages import HolderClient, HolderError, PoolDiffers, PoolError
from gpu_worker.shared_pool.region import HUGE_PAGE_BYTES, VERSION, Header, Region, header_bytes, identity_hash
from gpu_worker.wire.frames import Plan


class WorkerPool(PoolMemory, Protocol):
    """A worker's pool in memory that outlives it, on a CPU (`SharedPool`) or a GPU (`DevicePool`)."""

    pool_id: bytes
    layout: bytes
    num_bytes: int

    def attach(self, pools: Sequence[Tensor], page_size: int) -> None:
        """Lets the checksums of pages be those of these tensors, which `zeros` returned."""
        ...

    def begin_generation(self, generation: int) -> None:
        """Plans of this generation follow."""
        ...

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """Called before a step, with its rows and pages in the tables, positions as before it. Raises PoolError."""
        ...

    def end_step(self, step: int) -> Callable[[], None] | None:
        """Called when the step is computed, or enqueued. What it returns is called when the step has ended."""
        ...

    def take_over(self, order: pb.TakeOver) -> None:
        """Replaces the own pool by that of a dead worker. Raises PoolError."""
        ...


class SharedPool:
    """The pool of one worker on a CPU."""

    def __init__(
        self, holder: HolderClient, layers: LayerMap, geometry: Geometry, dtype: torch.dtype, *, identity: str
    ) -> None:
        """Gets and maps a new pool. Raises HolderError, or OSError."""
        self._holder, self._num_pages = holder, geometry.num_pages
        shapes = [
            tensor_shape(layer.kind, num_pages=geometry.num_pages, page_size=geometry.page_size)
            for layer in layers.layers
        ]
        self._sizes = [_aligned(math.prod(shape) * dtype.itemsize) for shape in shapes for _ in range(2)]
        self.layout = layout_of(layers, geometry, dtype)
        self._identity = identity_hash(identity)
        self.num_bytes = num_bytes = header_bytes(geometry.num_pages) + sum(self._sizes)
        self.pool_id, memory = holder.create(num_bytes)
        try:
            self._region = Region(memory, num_bytes)
        finally:
            os.close(memory)
        self._free_at = header_bytes(geometry.num_pages)
        self._header = Header(self._region.bytes_at(0, header_bytes(geometry.num_pages)), geometry.num_pages)
        self._guard = PageGuard(self._header, geometry.num_pages)
        self._describe()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor of the pool. Called for K and V of each layer, in order."""
        num_items = math.prod(shape)
        buffer = self._region.bytes_at(self._free_at, num_items * dtype.itemsize)
        self._free_at += _aligned(num_items * dtype.itemsize)
        return torch.frombuffer(buffer, dtype=dtype, count=num_items).view(shape)

    def zero(self) -> None:
        """Makes every page zero, and frees its memory until it is written."""
        self._region.zero()
        self._describe()
        self._guard.forget()

    def attach(self, pools: Sequence[Tensor], page_size: int) -> None:
        """Lets the checksums of pages be those of these tensors, which `zeros` returned."""
        self._guard.checksum = PageChecksums(pools, page_size).of

    def begin_generation(self, generation: int) -> None:
        """Plans of this generation follow."""
        self._guard.begin_generation(generation)

    def begin_step(self, plan: Plan, tables: RowTables) -> None:
        """Called before a step, with its rows and pages in the tables, positions as before it. Raises PageDamaged."""
        self._guard.begin_step(plan, tables)

    def end_step(self, step: int) -> Callable[[], None] | None:
        """Called when the step has ended well."""
        return self._guard.end_step(step)

    def take_over(self, order: pb.TakeOver) -> None:
        """Replaces the own pool by that of a dead worker, if it is the pool that the order describes.

        Raises PoolError; this pool is unchanged then.
        """
        memory = self._holder.take(order.pool_id, self._region.num_bytes)
        try:
            self._check(memory, order)
            self._region.replace(memory)
        except OSError as error:
            raise PoolError(f"the pool of a dead worker cannot be mapped: {error}") from error
        finally:
            os.close(memory)
        self._guard.taken_over()
        own, self.pool_id = self.pool_id, order.pool_id
        if own != order.pool_id:
            # If the holder does not answer, it frees the pool when this process ends.
            with suppress(HolderError):
                self._holder.give_back(own)

    def _check(self, memory: int, order: pb.TakeOver) -> None:
        data = os.pread(memory, header_bytes(self._num_pages), 0)
        found = Header(bytearray(data), self._num_pages)
        found.check(pool_id=order.pool_id, layout=self.layout, identity=self._identity, generation=order.generation)

    def _describe(self) -> None:
        self._header.write(pool_id=self.pool_id, layout=self.layout, identity=self._identity)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def layout_of(layers: LayerMap, geometry: Geometry, dtype: torch.dtype) -> bytes:
    """Returns the SHA-256 of where K and V of a page are, and of what each layer attends to."""
    parts = [VERSION, dtype, geometry.page_size, geometry.num_pages, *(layer.kind for layer in layers.layers)]
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).digest()


class PrivatePool:
    """The same for a worker whose pool ends with it. It has nothing to record or to check."""

    pool_id = layout = b""
    num_bytes = 0

    def attach(self, pools: Sequence[Tensor], page_size: int) -> None: ...

    def begin_generation(self, generation: int) -> None: ...

    def begin_step(self, plan: Plan, tables: RowTables) -> None: ...

    def end_step(self, step: int) -> None:
        return None

    def take_over(self, order: pb.TakeOver) -> None:
        """Raises PoolDiffers."""
        raise PoolDiffers("the pool of this worker is not in shared memory")
