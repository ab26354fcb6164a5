"""`python -m tests.rigs.fake_gpu_worker FLAGS`: the real worker on a CPU, with the KV pool of a GPU.

The pool is a `DevicePool` on the fake libcuda, so that the scheduler, the holder and the link see what a worker on a
GPU does: memory for the first pages alone, and a pool that is mapped when requests come.
"""

import sys

import torch

from gpu_worker import __main__ as program
from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool import start
from gpu_worker.shared_pool.cuda_driver import Driver
from gpu_worker.shared_pool.device_pool import DevicePool
from gpu_worker.shared_pool.messages import HolderClient
from tests.gpu_worker.cuda_memory.fake_libcuda import FakeCard, FakeLibcuda


def open_pool(
    settings: WorkerSettings,
    layers: LayerMap,
    geometry: Geometry,
    *,
    dtype: torch.dtype,
    device: torch.device,
    identity: str,
) -> DevicePool:
    """As `start.open_pool` does on a GPU."""
    holder, driver = HolderClient(settings.runtime_dir), Driver(FakeLibcuda(FakeCard()), 0)
    is_whole = not settings.standby and not holder.unused_on(driver.uuid())[0]
    return DevicePool(holder, driver, layers, geometry, dtype, identity=identity, device=device, is_whole=is_whole)


if __name__ == "__main__":
    start.open_pool = open_pool  # type: ignore[assignment]
    sys.exit(program.main(sys.argv[1:]))
