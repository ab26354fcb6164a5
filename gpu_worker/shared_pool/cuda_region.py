"""Memory of a GPU that torch did not allocate: addresses with replaceable memory, and tensors over it.

Owns the reservation and what is mapped at it. A region has either one memory over its whole length, which other
processes can map too, or *pieces* of the process's own, or nothing. Tensors and captured graphs keep pointing to the
addresses, so memory must stay mapped while they are used.

A worker tries at its start whether device memory can outlive its process here. NVIDIA documents that memory is freed
when its handles, mappings and descriptors are all gone; the kernel module exports an object to a descriptor "even if
the source rm client gets destroyed" (rmobjexportimport.c of open-gpu-kernel-modules). Containers, virtual GPUs and old
drivers may differ.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from gpu_worker.shared_pool.cuda_driver import CudaError, Driver

_PATTERN = 0xA5


class DeviceRegion:
    """`num_bytes`, a multiple of the granularity, at addresses that stay for the process's life.

    The caller sees to it that no work of the device uses the addresses while their memory is replaced.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        """Reserves the addresses. Raises CudaError."""
        self._driver, self.num_bytes = driver, num_bytes
        # For handles of the whole region's memory; what is mapped stays after the release of its handle.
        self.export, self.import_from, self.release = driver.export, driver.import_from, driver.release
        self.granularity = driver.granularity()
        assert num_bytes % self.granularity == 0, "the caller rounds up"
        self.address = driver.reserve(num_bytes, self.granularity)
        # What is mapped: lengths by offset, and for pieces their handles.
        self._mapped: dict[int, int] = {}

    @property
    def is_whole(self) -> bool:
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
        # Addresses cannot be freed if their mapping cannot be ended.
        driver.unmap(address, num_bytes)
        driver.free_addresses(address, num_bytes)


class _Memory:
    """Device memory in the form that torch reads (the CUDA array interface)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """A uint8 tensor [num_bytes] over the memory at the address.

    On a GPU, torch asks the driver which device has the address, so memory must be mapped at the first byte.
    """
    if device.type != "cuda":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Memory(address, num_bytes), device=device)


def check_exportable(driver: Driver, device: torch.device) -> None:
    """Raises CudaError, or returns within milliseconds.

    Writes to new memory, gives up all but a descriptor of it, imports that, and reads the memory at other addresses.
    """
    if not driver.is_exportable():
        raise CudaError(f"{device} has no memory that file descriptors can stand for", code=-1)
    num_bytes = driver.granularity()
    descriptor = _written(driver, num_bytes, device)
    try:
        handle = driver.import_from(descriptor)
    finally:
        os.close(descriptor)
    try:
        with mapped_at_new_addresses(driver, handle, num_bytes, num_bytes) as address:
            if not bool((bytes_at(address, num_bytes, device) == _PATTERN).all()):
                raise CudaError("memory changed while only a descriptor of it was left", code=-1)
    finally:
        driver.release(handle)


def _written(driver: Driver, num_bytes: int, device: torch.device) -> int:
    """A descriptor of memory that has no handle and no mapping any more."""
    handle = driver.create(num_bytes)
    try:
        with mapped_at_new_addresses(driver, handle, num_bytes, num_bytes) as address:
            bytes_at(address, num_bytes, device).fill_(_PATTERN)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return driver.export(handle)
    finally:
        driver.release(handle)
