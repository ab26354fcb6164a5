"""A KV pool in memory that outlives its worker, and the taking over of a dead worker's pool.

Owns the memory's place in this process and which pool it is. `guard.py` owns which pages are whole. Tensors and
recorded kernels point to the region's addresses, so a pool that is taken over is mapped at the same ones.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.attention.kv_cache import PoolMemory, tensor_shape
from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.shared_pool.cuda_region import bytes_at
from gpu_worker.shared_pool.guard import PageGuard, checksums_of, words_of
from gpu_worker.shared_pool.messages import HolderClient, HolderError, PoolDiffers, PoolError, close_all
from gpu_worker.shared_pool.region import HUGE_PAGE_BYTES, VERSION, Header, Region, header_bytes, identity_hash
from gpu_worker.wire.frames import Plan


class WorkerPool(PageGuard, PoolMemory):
    """A worker's pool in memory that outlives it, on a CPU (`SharedPool`) or a GPU (`DevicePool`)."""

    # K and V of each layer follow each other: where the next one begins, and of what number each takes a multiple.
    _address: int
    _alignment: int
    # What is in memory of a GPU.
    _device_bytes = 0

    def __init__(
        self,
        holder: HolderClient,
        geometry: Geometry,
        *,
        layout: bytes,
        identity: str,
        num_bytes: int,
        device: str = "",
    ) -> None:
        """Gets `num_bytes` of host memory, which begins with the header, and maps it. Raises HolderError, or OSError.

        device: names the GPU that has the pages.
        """
        self._holder, self._num_pages = holder, geometry.num_pages
        self.layout, self._identity, self.num_bytes = layout, identity_hash(identity), num_bytes
        self.pool_id, memory = holder.create(num_bytes, device=device, pages=geometry.num_pages if device else 0)
        try:
            self._host = Region(memory, num_bytes)
        finally:
            os.close(memory)
        self._header_bytes = header_bytes(geometry.num_pages)
        header = Header(self._host.bytes_at(0, self._header_bytes), geometry.num_pages)
        super().__init__(header, geometry.num_pages)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor of the pool. Called for K and V of each layer, in order."""
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = bytes_at(self._address, num_bytes, device)
        self._address += align_up(num_bytes, self._alignment)
        return memory.view(dtype).view(shape)

    def attach(self, pools: Sequence[Tensor], page_size: int) -> None:
        """Lets the checksums of pages be those of these tensors, which `zeros` returned."""
        self.checksums = checksums_of(words_of(pools, page_size))

    def take_over(self, order: pb.TakeOver) -> None:
        """Replaces the own pool by that of a dead worker, if it is the pool that the order describes.

        On a GPU it waits for the device. Raises PoolError; this pool is unchanged then.
        """
        memories = self._holder.take(order.pool_id, self._host.num_bytes, self._device_bytes)
        try:
            other = Header(bytearray(os.pread(memories[0], self._header_bytes, 0)), self._num_pages)
            other.check(pool_id=order.pool_id, layout=self.layout, identity=self._identity, generation=order.generation)
            self._map(memories)
        except OSError as error:
            raise PoolError(f"the pool of a dead worker cannot be mapped: {error}") from error
        finally:
            close_all(memories)
        self.restart(is_unchecked=True)
        replaced_id, self.pool_id = self.pool_id, order.pool_id
        if replaced_id != order.pool_id:
            # If the holder does not answer, it frees the pool when this process ends.
            with suppress(HolderError):
                self._holder.give_back(replaced_id)

    def _map(self, memories: Sequence[int]) -> None:
        """Puts the memory in place of the own one. Raises PoolError or OSError."""
        self._host.replace(memories[0])

    def _describe(self) -> None:
        """Notes that the pool is zeroed: no page is whole."""
        self._header.write(pool_id=self.pool_id, layout=self.layout, identity=self._identity)
        self.restart(is_unchecked=False)


class SharedPool(WorkerPool):
    """The pool of one worker on a CPU."""

    def __init__(
        self, holder: HolderClient, layers: LayerMap, geometry: Geometry, dtype: torch.dtype, *, identity: str
    ) -> None:
        """Gets and maps a new pool. Raises HolderError, or OSError."""
        self._alignment = HUGE_PAGE_BYTES
        sizes = [align_up(math.prod(shape) * dtype.itemsize, HUGE_PAGE_BYTES) for shape in shapes_of(layers, geometry)]
        num_bytes = header_bytes(geometry.num_pages) + sum(sizes)
        layout = layout_of(layers, geometry, dtype)
        super().__init__(holder, geometry, layout=layout, identity=identity, num_bytes=num_bytes)
        self._address = self._host.address + self._header_bytes
        self._describe()

    def zero(self) -> None:
        """Makes every page zero, and frees its memory until it is written."""
        self._host.zero()
        self._describe()


def shapes_of(layers: LayerMap, geometry: Geometry) -> list[tuple[int, int, int]]:
    sizes = {"num_pages": geometry.num_pages, "page_size": geometry.page_size}
    return [shape for layer in layers.layers for shape in [tensor_shape(layer.kind, **sizes)] * 2]


def layout_of(layers: LayerMap, geometry: Geometry, dtype: torch.dtype) -> bytes:
    """Returns the SHA-256 of where K and V of a page are, and of what each layer attends to."""
    parts = [VERSION, dtype, geometry.page_size, geometry.num_pages, *(layer.kind for layer in layers.layers)]
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).digest()


class PrivatePool:
    """The same for a worker with a pool that ends with it. It has nothing to record or to check."""

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
