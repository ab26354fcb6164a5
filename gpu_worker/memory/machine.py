"""Measures what sizes are chosen from: free memory, and the pools that dead workers left."""

import torch

from gpu_worker.memory.device_memory import free_bytes, free_host_bytes
from gpu_worker.memory.sizes import Machine
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool.start import shares_pool, unused_pools


def machine_of(settings: WorkerSettings, device: torch.device) -> Machine:
    """The device as it is now. Raises ValueError if shared_pool is on and cannot be."""
    is_gpu, unused = device.type == "cuda", unused_pools(settings, device)
    return Machine(
        place=str(device),
        free=free_bytes(device) + unused.num_bytes,
        free_host=free_host_bytes() if is_gpu else 0,
        shares_pool=is_gpu and shares_pool(settings, device),
        held_pages=unused.pages,
    )
