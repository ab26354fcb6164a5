"""The driver's calls: their binary interface against cuda.h, errors as sentences, and what each call leaves behind."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_worker.shared_pool import cuda_driver as calls
from gpu_worker.shared_pool.cuda_driver import CudaError, DeviceMemoryUsedUp, Driver
from gpu_worker.shared_pool.cuda_region import DeviceRegion, bytes_at, check_exportable, mapped_at_new_addresses
from tests.gpu_worker.cuda_memory.fake_libcuda import GRANULARITY, INVALID_VALUE, FakeCard, FakeLibcuda
from tests.rigs.descriptors import open_descriptors

CPU = torch.device("cpu")
HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
# Prints what `calls.py` claims, from the header's own definitions.
PROBE = r"""
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>
#define FIELD(type, name) (int)offsetof(type, name)
int main(void) {
  printf("%d %d %d %d %d ", (int)sizeof(CUmemAllocationProp), FIELD(CUmemAllocationProp, requestedHandleTypes),
         FIELD(CUmemAllocationProp, location), FIELD(CUmemAllocationProp, win32HandleMetaData),
         FIELD(CUmemAllocationProp, allocFlags));
  printf("%d %d %d %d ", (int)sizeof(CUmemAccessDesc), FIELD(CUmemAccessDesc, flags), (int)sizeof(CUuuid),
         (int)(sizeof(CUdeviceptr) + sizeof(CUmemGenericAllocationHandle)));
  printf("%d %d %d %d %d %d %d %d %d\n", CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY,
         CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
         CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, CU_MEM_ALLOCATION_TYPE_PINNED,
         CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
         CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  return 0;
}
"""


@pytest.fixture
def library() -> FakeLibcuda:
    return FakeLibcuda(FakeCard())


@pytest.mark.skipif(not HEADERS or shutil.which("gcc") is None, reason="needs cuda.h and gcc")
def test_structures_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    source, program = tmp_path / "probe.c", tmp_path / "probe"
    source.write_text(PROBE)
    subprocess.run(["gcc", f"-I{HEADERS[-1].parent}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    prop, access = calls.AllocationProp, calls.AccessDesc
    offsets = [getattr(prop, name).offset for name, *_ in prop._fields_[1:]]
    sizes = [ctypes.sizeof(prop), *offsets, ctypes.sizeof(access), access.flags.offset, ctypes.sizeof(calls.Uuid)]
    sizes.append(ctypes.sizeof(calls.Address) + ctypes.sizeof(calls.Handle))
    constants = [calls.SUCCESS, calls.OUT_OF_MEMORY, calls.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED]
    constants += [calls.FILE_DESCRIPTOR_SUPPORTED, calls.PINNED, calls.ON_DEVICE, calls.FILE_DESCRIPTOR]
    constants += [calls.READ_WRITE, calls.MINIMUM]
    assert [int(each) for each in printed.split()] == [*sizes, *constants]


def test_memory_keeps_its_content_while_only_a_descriptor_is_left(library: FakeLibcuda) -> None:
    before = open_descriptors()
    check_exportable(Driver(library, 0), CPU)
    assert library.is_empty() and open_descriptors() == before and library.card.used() == 0


@pytest.mark.parametrize(
    "name", [name for name in calls.CALLS if name not in ("cuInit", "cuDeviceGet", "cuDeviceGetUuid_v2")]
)
def test_each_call_that_fails_is_named_and_leaves_nothing_behind(library: FakeLibcuda, name: str) -> None:
    driver, before = Driver(library, 0), open_descriptors()
    library.fails[name] = calls.OUT_OF_MEMORY
    with pytest.raises(DeviceMemoryUsedUp) as error:
        check_exportable(driver, CPU)
    message = str(error.value)
    assert message.startswith(f"{name} failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"), message
    assert message.endswith(calls.HINTS.get(name, ""))
    library.fails.clear()
    # What cannot be given back stays.
    if name not in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree"):
        assert library.is_empty() and open_descriptors() == before
    library.end()


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet"])
def test_a_driver_that_does_not_start_says_so(library: FakeLibcuda, name: str) -> None:
    library.fails[name] = 100
    with pytest.raises(CudaError, match=rf"^{name} failed with code \(100\); "):
        Driver(library, 0)


def test_an_old_library_is_named(library: FakeLibcuda) -> None:
    del library.cuMemExportToShareableHandle
    with pytest.raises(CudaError, match="has no cuMemExportToShareableHandle: the driver must be of CUDA"):
        Driver(library, 0)


def test_a_device_without_exportable_memory_is_refused() -> None:
    library = FakeLibcuda(FakeCard(), is_supported=False)
    with pytest.raises(CudaError, match="cpu has no memory that file descriptors can stand for"):
        check_exportable(Driver(library, 0), CPU)


def test_pieces_give_way_to_the_whole_at_the_same_addresses(library: FakeLibcuda) -> None:
    driver = Driver(library, 0)
    region = DeviceRegion(driver, 8 * GRANULARITY)
    region.map_pieces([0, 3 * GRANULARITY])
    assert not region.is_whole and library.card.used() == 2 * GRANULARITY
    bytes_at(region.address + 3 * GRANULARITY, GRANULARITY, CPU).fill_(3)
    handle = driver.create(region.num_bytes)
    with mapped_at_new_addresses(driver, handle, region.num_bytes) as address:
        bytes_at(address, 8 * GRANULARITY, CPU).fill_(7)
    region.replace(handle)
    driver.release(handle)
    assert region.is_whole and library.card.used() == 8 * GRANULARITY
    assert bool((bytes_at(region.address, 8 * GRANULARITY, CPU) == 7).all())
    region.clear()
    assert library.card.used() == 0


def test_the_fake_keeps_the_driver_s_rules(library: FakeLibcuda) -> None:
    """A mapping within another, one of a wrong size, and half of one: each is refused."""
    driver = Driver(library, 0)
    address, handle = driver.reserve(4 * GRANULARITY, GRANULARITY), driver.create(2 * GRANULARITY)
    driver.map(address, 2 * GRANULARITY, handle)
    for wrong in (
        lambda: driver.map(address + GRANULARITY, 2 * GRANULARITY, handle),
        lambda: driver.map(address + 2 * GRANULARITY + 4096, GRANULARITY, handle),
        lambda: driver.map(address + 2 * GRANULARITY, 4 * GRANULARITY, handle),
        lambda: driver.unmap(address, GRANULARITY),
        lambda: driver.free_addresses(address, 4 * GRANULARITY),
        lambda: driver.create(GRANULARITY + 4096),
        lambda: driver.release(handle + 1),
    ):
        with pytest.raises(CudaError, match=rf"CUDA_ERROR_INVALID_VALUE \({INVALID_VALUE}\)"):
            wrong()
    library.end()
    assert library.is_empty()


def test_memory_whose_access_is_not_set_is_not_accessible() -> None:
    """In a process of its own, because the access ends it."""
    code = (
        "import torch, ctypes\n"
        "from gpu_worker.shared_pool.cuda_driver import Driver\n"
        "from gpu_worker.shared_pool.cuda_region import bytes_at\n"
        "from tests.gpu_worker.cuda_memory.fake_libcuda import *\n"
        "library = FakeLibcuda(FakeCard())\n"
        "driver = Driver(library, 0)\n"
        "address, handle = driver.reserve(GRANULARITY, GRANULARITY), driver.create(GRANULARITY)\n"
        "assert library.cuMemMap(address, GRANULARITY, 0, handle, 0) == 0\n"
        "bytes_at(address, GRANULARITY, torch.device('cpu')).fill_(1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert ended.returncode == -11
