"""Memory of a GPU that torch did not allocate: addresses with replaceable memory, and tensors over it.

Owns the reservation and what is mapped at it. A region has either one memory over its whole length, which other
processes can map too, or *pieces* of the process's own, or nothing. Tensors and captured graphs keep pointing to the
addresses, so memory must stay mapped while they are used. A worker tries at its start whether device memory can outlive
its process here: `README.md` says why it should; containers, virtual GPUs and old drivers may differ.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

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
        self.granularity = driver.granularity()
        assert num_bytes % self.granularity == 0, "the caller rounds up"
        self.address = driver.reserve(num_bytes, self.granularity)
        # The bytes of each mapping by its offset. A mapping stays after the release of its handle.
        self.mapped: dict[int, int] = {}

    @property
    def is_whole(self) -> bool:
        return self.mapped.get(0) == self.num_bytes

    def map_pieces(self, offsets: Sequence[int]) -> None:
        """Maps new memory of one granule at each offset, a multiple of the granularity. Raises CudaError."""
        assert not self.mapped
        for offset in offsets:
            handle = self._driver.create(self.granularity)
            try:
                self._map(offset, self.granularity, handle)
            finally:
                # The mapping keeps the memory.
                self._driver.release(handle)

    def replace(self, handle: int) -> None:
        """Unmaps everything and maps this memory over the whole region.

        Raises CudaError; then nothing is mapped. `mapped_at_new_addresses` finds out before whether it can be mapped.
        """
        self.clear()
        self._map(0, self.num_bytes, handle)

    def clear(self) -> None:
        """Unmaps everything. Memory without another handle, mapping or descriptor is freed."""
        for offset, num_bytes in list(self.mapped.items()):
            self._driver.unmap(self.address + offset, num_bytes)
            del self.mapped[offset]

    def _map(self, offset: int, num_bytes: int, handle: int) -> None:
        self._driver.map(self.address + offset, num_bytes, handle)
        self.mapped[offset] = num_bytes


@contextmanager
def mapped_at_new_addresses(driver: Driver, handle: int, num_bytes: int) -> Iterator[int]:
    """The first address of memory that is mapped meanwhile; at the end no work may use it. Raises CudaError."""
    address = driver.reserve(num_bytes, driver.granularity())
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


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """A uint8 tensor [num_bytes] over the memory at the address.

    On a GPU, torch asks the driver which device has the address, so memory must be mapped at the first byte.
    """
    if device.type != "cuda":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    # What torch reads of memory that it did not allocate (the CUDA array interface).
    about = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "strides": None, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=about), device=device)


def check_exportable(driver: Driver, device: torch.device) -> None:
    """Raises CudaError, or returns within milliseconds.

    Writes to new memory, gives up all but a descriptor of it, imports that, and reads the memory at other addresses.
    """
    if not driver.is_exportable():
        raise CudaError(f"{device} has no memory that file descriptors can stand for")
    num_bytes = driver.granularity()
    handle = driver.create(num_bytes)
    try:
        with mapped_at_new_addresses(driver, handle, num_bytes) as address:
            bytes_at(address, num_bytes, device).fill_(_PATTERN)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        descriptor = driver.export(handle)
    finally:
        driver.release(handle)
    try:
        handle = driver.import_from(descriptor)
    finally:
        os.close(descriptor)
    try:
        with mapped_at_new_addresses(driver, handle, num_bytes) as address:
            if not bool((bytes_at(address, num_bytes, device) == _PATTERN).all()):
                raise CudaError("memory changed while only a descriptor of it was left")
    finally:
        driver.release(handle)
