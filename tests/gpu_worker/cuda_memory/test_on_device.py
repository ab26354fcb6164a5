"""What only a driver can show: memory outlives the process that made it, and graphs replay on what is mapped later.

`make test-gpu PARTS=shared_pool` runs these tests.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.shared_pool.cuda_driver import Driver, cuda_driver
from gpu_worker.shared_pool.cuda_region import DeviceRegion, bytes_at, check_exportable, mapped_at_new_addresses
from gpu_worker.shared_pool.messages import HolderClient
from tests.rigs.processes import Rig

pytestmark = pytest.mark.cuda

HEADER_BYTES, NUM_BYTES = 2 << 20, 512 << 20
# A worker: fills a pool with a pattern, lets the holder keep it, and then writes to its second half until it is killed.
WORKER = """
import sys, torch
from pathlib import Path
from gpu_worker.shared_pool.cuda_driver import cuda_driver
from gpu_worker.shared_pool.cuda_region import DeviceRegion
from gpu_worker.shared_pool.cuda_region import bytes_at
from gpu_worker.shared_pool.messages import HolderClient
device = torch.device("cuda", 0)
torch.cuda.init()
driver, num_bytes = cuda_driver(0), int(sys.argv[2])
region, holder = DeviceRegion(driver, num_bytes), HolderClient(Path(sys.argv[1]))
handle = driver.create(region.num_bytes)
region.replace(handle)
pool, _ = holder.create(2 << 20, device=driver.uuid(), pages=2)
words = bytes_at(region.address, num_bytes, device).view(torch.int32)
torch.arange(words.numel(), dtype=torch.int32, device=device, out=words)
torch.cuda.synchronize()
holder.attach(pool, driver.export(handle), num_bytes)
print(pool.hex(), flush=True)
half = words[words.numel() // 2 :]
while True:
    half.add_(1)
"""


@pytest.fixture
def driver(device: torch.device) -> Driver:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    torch.cuda.init()
    return cuda_driver(device.index or 0)


@pytest.fixture
def holding(driver: Driver) -> Iterator[tuple[HolderClient, Path]]:
    with Rig() as rig:
        rig.holder()
        client = HolderClient(rig.runtime_dir)
        yield client, rig.runtime_dir
        client.close()


def test_the_start_s_check_passes(driver: Driver, device: torch.device) -> None:
    # The first one loads kernels.
    check_exportable(driver, device)
    free = torch.cuda.mem_get_info(device)[0]
    for _ in range(20):
        check_exportable(driver, device)
    assert driver.granularity() == 2 << 20
    assert torch.cuda.mem_get_info(device)[0] >= free - (8 << 20)


def test_memory_outlives_a_killed_process_and_is_no_longer_written(
    driver: Driver, device: torch.device, holding: tuple[HolderClient, Path]
) -> None:
    holder, folder = holding
    command = [sys.executable, "-c", WORKER, str(folder), str(NUM_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pool_id = bytes.fromhex(worker.stdout.readline())
        time.sleep(0.2)
        worker.send_signal(signal.SIGKILL)
        header, memory = holder.take(pool_id, HEADER_BYTES, NUM_BYTES)
        os.close(header)
        region = DeviceRegion(driver, NUM_BYTES)
        handle = driver.import_from(memory)
        os.close(memory)
        region.replace(handle)
        words = bytes_at(region.address, NUM_BYTES, device).view(torch.int32)
        half = words.numel() // 2
        first_look = words[half:].clone()
        assert torch.equal(words[:half], torch.arange(half, dtype=torch.int32, device=device))
        # The dead worker wrote, and its last kernel has ended.
        assert int(first_look[0]) > half
        time.sleep(0.5)
        assert torch.equal(words[half:], first_look)
    free = torch.cuda.mem_get_info(device)[0]
    region.clear()
    driver.release(handle)
    holder.give_back(pool_id)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(device)[0] >= free + NUM_BYTES - (2 << 20)


def test_a_graph_replays_on_memory_that_is_mapped_later(driver: Driver, device: torch.device) -> None:
    granule = driver.granularity()
    region = DeviceRegion(driver, 8 * granule)
    region.map_pieces([0, 4 * granule])
    first, second = (bytes_at(region.address + at, granule, device) for at in (0, 4 * granule))
    first.fill_(1)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # Kernels are loaded before the capture.
    second.copy_(first)
    second.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        second.copy_(first)
        second.add_(1)
    for value in (5, 7):
        handle = driver.create(region.num_bytes)
        with mapped_at_new_addresses(driver, handle, region.num_bytes) as address:
            bytes_at(address, 8 * granule, device).fill_(value)
            torch.cuda.synchronize()
        region.replace(handle)
        driver.release(handle)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((first == value).all()) and bool((second == value + 1).all())
    region.clear()


def test_unmapped_memory_is_free_again(driver: Driver, device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0]
    region = DeviceRegion(driver, NUM_BYTES)
    handle = driver.create(region.num_bytes)
    region.replace(handle)
    driver.release(handle)
    assert torch.cuda.mem_get_info(device)[0] <= free - NUM_BYTES
    region.clear()
    assert torch.cuda.mem_get_info(device)[0] >= free - (2 << 20)
