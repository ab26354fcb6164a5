"""Decides at a worker's start whether its KV pool is in shared memory."""

import logging
from pathlib import Path

import torch

from gpu_worker.attention.layers import LayerMap
from gpu_worker.geometry import Geometry
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool.client import HolderClient
from gpu_worker.shared_pool.errors import HolderError
from gpu_worker.shared_pool.messages import holder_socket
from gpu_worker.shared_pool.pool import SharedPool

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
) -> SharedPool | None:
    """Returns the shared pool, or None if the pool ends with the worker. Raises ValueError if shared_pool is on."""
    if not _may_share(settings, device):
        return None
    try:
        pool = SharedPool(HolderClient(settings.runtime_dir), layers, geometry, dtype, identity=identity)
    except (HolderError, OSError) as error:
        if settings.shared_pool == "on":
            raise ValueError(f"shared_pool is on: {error}; start the holder, or set shared_pool to auto") from error
        log.warning("the KV pool ends with this worker: %s", error)
        return None
    log.info("the KV pool outlives this worker: pool %s", pool.pool_id.hex()[:8])
    if not _has_huge_pages():
        log.info(
            "shared memory has no huge pages here, so decode steps may take 10 %% longer; root can allow them: "
            "echo advise > %s",
            _HUGE_PAGES,
        )
    return pool


def reclaimable_bytes(settings: WorkerSettings, device: torch.device) -> int:
    """Memory of pools without a user. It counts as free, because the worker takes one of them over or none is kept."""
    if not _may_share(settings, device):
        return 0
    try:
        return HolderClient(settings.runtime_dir).unused_bytes()
    except HolderError:
        return 0


def _has_huge_pages() -> bool:
    """Whether shared memory gets huge pages on advice. True where the system does not say."""
    try:
        return "[never]" not in (text := _HUGE_PAGES.read_text()) and "[deny]" not in text
    except OSError:
        return True


def _may_share(settings: WorkerSettings, device: torch.device) -> bool:
    """Raises ValueError if shared_pool is on for a device without shared pools."""
    if settings.shared_pool == "on" and device.type != "cpu":
        raise ValueError(f"shared_pool is on; the KV pool of {device} cannot be shared: set shared_pool to auto")
    if settings.shared_pool == "off" or device.type != "cpu":
        return False
    return settings.shared_pool == "on" or holder_socket(settings.runtime_dir).exists()
