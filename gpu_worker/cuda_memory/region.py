"""Addresses of a device whose memory can be replaced: tensors and captured graphs keep pointing to them.

Owns the reservation and what is mapped at it. A region has either one memory over its whole length, which other
processes can map too, or *pieces* of the process's own, or nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from gpu_worker.cuda_memory.driver import CudaError, Driver


class DeviceRegion:
    """`num_bytes`, a multiple of the granularity, at addresses that stay for the process's life.

    The caller sees to it that no work of the device uses the addresses while their memory is replaced.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        """Reserves the addresses. Raises CudaError."""
        self._driver, self.num_bytes = driver, num_bytes
        self.granularity = driver.granularity()
        assert num_bytes % self.granularity == 0, "the caller rounds up"
        self.address = driver.reserve(num_bytes, self.granularity)
        # What is mapped: lengths by offset, and for pieces their handles.
        self._mapped: dict[int, int] = {}

    @property
    def is_whole(self) -> bool:
        """Whether memory is mapped over the whole length."""
        return self._mapped.get(0) == self.num_bytes

    @property
    def mapped(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each mapping."""
        return sorted(self._mapped.items())

    def map_pieces(self, offsets: Sequence[int]) -> None:
        """Maps new memory of one granule at each offset, a multiple of the granularity. Raises CudaError."""
        assert not self._mapped
        for offset in offsets:
            handle = self._driver.create(self.granularity)
            try:
                self._map(offset, self.granularity, handle)
            finally:
                # The mapping keeps the memory.
                self._driver.release(handle)

    def create(self) -> int:
        """Returns a handle of new memory for the whole region, which the caller releases. Raises CudaError."""
        return self._driver.create(self.num_bytes)

    def export(self, handle: int) -> int:
        """Returns a descriptor of the memory, which the caller closes. Raises CudaError."""
        return self._driver.export(handle)

    def import_from(self, descriptor: int) -> int:
        """Returns a handle of the memory behind a descriptor, which the caller releases. Raises CudaError."""
        return self._driver.import_from(descriptor)

    def release(self, handle: int) -> None:
        """Gives the handle up; what is mapped stays."""
        self._driver.release(handle)

    def replace(self, handle: int) -> None:
        """Unmaps everything and maps this memory over the whole region.

        Raises CudaError; then nothing is mapped. `elsewhere` finds out before whether the memory can be mapped.
        """
        self.clear()
        self._map(0, self.num_bytes, handle)

    def elsewhere(self, handle: int) -> AbstractContextManager[int]:
        """As `mapped_at_new_addresses`, for memory of the region's size. Raises if it could not take its place."""
        return mapped_at_new_addresses(self._driver, handle, self.num_bytes, self.granularity)

    def clear(self) -> None:
        """Unmaps everything. Memory without another handle, mapping or descriptor is freed."""
        for offset, num_bytes in self.mapped:
            self._driver.unmap(self.address + offset, num_bytes)
            del self._mapped[offset]

    def _map(self, offset: int, num_bytes: int, handle: int) -> None:
        self._driver.map(self.address + offset, num_bytes, handle)
        self._mapped[offset] = num_bytes


@contextmanager
def mapped_at_new_addresses(driver: Driver, handle: int, num_bytes: int, alignment: int) -> Iterator[int]:
    """The first address of memory that is mapped for a moment. No work of the device may use it at the end.

    Raises CudaError.
    """
    address = driver.reserve(num_bytes, alignment)
    try:
        driver.map(address, num_bytes, handle)
    except CudaError:
        driver.free_addresses(address, num_bytes)
        raise
    try:
        yield address
    finally:
        # Addresses whose mapping cannot be ended cannot be freed either.
        driver.unmap(address, num_bytes)
        driver.free_addresses(address, num_bytes)
