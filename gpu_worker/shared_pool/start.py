"""Decides at a worker's start whether its KV pool is in shared memory."""

import logging
import re
from functools import cache
from pathlib import Path

import torch

from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry
from gpu_worker.process.machine import text_of
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool.cuda_driver import CudaError, Driver, cuda_driver
from gpu_worker.shared_pool.cuda_region import check_exportable
from gpu_worker.shared_pool.device_pool import DevicePool
from gpu_worker.shared_pool.messages import HolderClient, HolderError, holder_socket
from gpu_worker.shared_pool.pool import SharedPool, WorkerPool

log = logging.getLogger(__name__)

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def open_pool(
    settings: WorkerSettings,
    layers: LayerMap,
    geometry: Geometry,
    *,
    dtype: torch.dtype,
    device: torch.device,
    identity: str,
) -> WorkerPool | None:
    """Returns the shared pool, or None if the pool ends with the worker. Raises ValueError if shared_pool is on."""
    if settings.connect:
        log.info("the KV pool ends with this worker, because its scheduler is on another host")
    if not _is_wanted(settings, device):
        return None
    holder = HolderClient(settings.runtime_dir)
    try:
        if device.type == "cuda":
            # Beside the pool of a worker that serves, or has died, another one does not fit.
            is_whole = not settings.standby and not (unused_pools(settings, device) or (0, 0))[0]
            driver = _driver(device)
            pool: WorkerPool = DevicePool(
                holder, driver, layers, geometry, dtype, identity=identity, device=device, is_whole=is_whole
            )
            if not is_whole:
                log.info("until this worker serves, only the first pages of its KV pool have memory")
        else:
            pool = SharedPool(holder, layers, geometry, dtype, identity=identity)
    except (HolderError, CudaError, OSError) as error:
        if settings.shared_pool == "on":
            raise _refusal(error) from error
        log.warning("the KV pool ends with this worker: %s", error)
        return None
    log.info("the KV pool outlives this worker: pool %s", pool.pool_id.hex()[:8])
    if device.type == "cpu" and re.search(r"\[(never|deny)\]", text_of(_HUGE_PAGES)):
        log.info(
            "shared memory has no huge pages here, so decode steps may take 10 %% longer; root can allow them: "
            "echo advise > %s",
            _HUGE_PAGES,
        )
    return pool


def unused_pools(settings: WorkerSettings, device: torch.device) -> tuple[int, int] | None:
    """Bytes of pools without a user on this device, and on a GPU the pages of the newest; None if the pool is private.

    They count as free, because the worker takes one of these pools over or none is kept. On a GPU it tries whether
    memory can outlive a process. Raises ValueError if shared_pool is on and the pool cannot be shared.
    """
    if not _is_wanted(settings, device):
        return None
    holder = HolderClient(settings.runtime_dir)
    try:
        return holder.unused_on(_driver(device).uuid() if device.type == "cuda" else "")
    except (CudaError, HolderError, OSError) as error:
        # Without the holder, `open_pool` says so for a CPU.
        if device.type == "cuda" and settings.shared_pool == "on":
            raise _refusal(error) from error
        return None
    finally:
        holder.close()


@cache
def _driver(device: torch.device) -> Driver:
    """The driver of a GPU with memory that can outlive its process. Raises CudaError or OSError."""
    torch.cuda.init()
    driver = cuda_driver(device.index or 0)
    check_exportable(driver, device)
    return driver


def _refusal(error: Exception) -> ValueError:
    hint = "start the holder, or " if isinstance(error, HolderError) else ""
    return ValueError(f"shared_pool is on: {error}; {hint}set shared_pool to auto")


def _is_wanted(settings: WorkerSettings, device: torch.device) -> bool:
    if settings.shared_pool == "off" or settings.connect:
        return False
    if settings.shared_pool == "on":
        return True
    # On a GPU a shared pool takes some of its memory.
    has_standbys = device.type == "cpu" or settings.standby or settings.standbys > 0
    return has_standbys and holder_socket(settings.runtime_dir).exists()
