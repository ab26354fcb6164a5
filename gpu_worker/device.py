"""The device that the worker runs on, and the CPU threads that it uses.

Owns the choice of both. Knows nothing of models.
"""

import os
from pathlib import Path

import torch


def choose_device(name: str) -> torch.device:
    """The device `name` (cpu, cuda or cuda:N); if it is empty, CUDA if available. Raises ValueError."""
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if torch.version.cuda is None and torch.version.hip is None:
            raise ValueError(
                f"device is {name}; this torch ({torch.__version__}) is built without CUDA: "
                "install a CUDA build of torch, or set device cpu"
            )
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            hint = f"set cuda:0 to cuda:{count - 1}" if count else "nvidia-smi and CUDA_VISIBLE_DEVICES show why"
            raise ValueError(f"device is {name}; this machine has {count} CUDA devices: {hint}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def set_threads(threads: int | None) -> None:
    """Sets the threads of one operation, by default all physical cores but one; operations run one at a time.

    Scheduler, front end and clients need a core: with a thread on every core, each operation waits for a thread that is
    not scheduled, and a step of 14 ms took 200.
    """
    torch.set_num_threads(threads or max(1, num_physical_cores() - 1))
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def num_physical_cores() -> int:
    """Physical cores among the CPUs of this process; more threads than that would only contend."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)
