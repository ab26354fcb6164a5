"""Measures free memory on device and host, pools that dead workers left, and the peak growth of an operation.

Owns the queries to CUDA and /proc. Decides nothing.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpu_worker.memory.sizing import Machine
from gpu_worker.process.machine import CGROUPS, PROC, memory_groups, text_of
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool.start import unused_pools


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Host memory available without swapping: the least of the machine and each control group of this process."""
    figures = dict(re.findall(r"^(\w+):\s+(\d+) kB", text_of(proc / "meminfo"), re.MULTILINE))
    if "MemAvailable" in figures:
        free = int(figures["MemAvailable"]) << 10
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *(left for _, left in memory_groups(proc, cgroups))]))


@contextmanager
def resident_growth(device: torch.device) -> Iterator[list[int]]:
    """Appends the peak growth of memory within: allocated on CUDA, resident on Linux, nothing on other systems."""
    grown: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield grown
        torch.cuda.synchronize(device)
        grown.append(torch.cuda.max_memory_allocated(device) - before)
        return
    # The C library keeps freed memory, which would hide growth.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    try:
        # Resets the peak to the present resident size.
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        yield grown
        return
    before = _status("VmRSS")
    yield grown
    grown.append(max(0, _status("VmHWM") - before))


def _status(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text_of(PROC / "self" / "status"), re.MULTILINE)
    return int(match.group(1)) << 10 if match else 0


def machine_of(settings: WorkerSettings, device: torch.device) -> Machine:
    """The device as it is now. Raises ValueError if shared_pool is on and cannot be."""
    is_gpu, unused = device.type == "cuda", unused_pools(settings, device)
    num_bytes, pages = unused or (0, 0)
    return Machine(
        place=str(device),
        free=free_bytes(device) + num_bytes,
        free_host=free_host_bytes() if is_gpu else 0,
        shares_pool=is_gpu and unused is not None,
        held_pages=pages,
    )
