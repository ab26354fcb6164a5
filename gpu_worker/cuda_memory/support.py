"""Finds out at a worker's start whether device memory can outlive its process here.

NVIDIA documents that memory is freed when its handles, mappings and descriptors are all gone; the kernel module exports
an object to a descriptor "even if the source rm client gets destroyed" (rmobjexportimport.c of
open-gpu-kernel-modules). Containers, virtual GPUs and old drivers may differ, so this is tried.
"""

import os

import torch

from gpu_worker.cuda_memory.driver import CudaError, Driver
from gpu_worker.cuda_memory.region import mapped_at_new_addresses
from gpu_worker.cuda_memory.tensors import bytes_at

_PATTERN = 0xA5


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
