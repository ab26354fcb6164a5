"""What runs the steps of a device."""

import torch

from gpu_worker.cpu.graphs import cpu_graphs
from gpu_worker.cuda.graphs import CudaGraphs
from gpu_worker.graphs import GraphBackend
from gpu_worker.native.library import native_library
from gpu_worker.settings import WorkerSettings


def captures_steps(settings: WorkerSettings, device: torch.device) -> bool:
    """Whether this device captures steps. On a CPU without C++ kernels a graph would save nothing."""
    if settings.graphs == "off":
        return False
    return device.type == "cuda" or (device.type == "cpu" and native_library() is not None)


def graphs_for(settings: WorkerSettings, device: torch.device) -> GraphBackend | None:
    """What captures steps on this device; None if they are not captured."""
    if not captures_steps(settings, device):
        return None
    return CudaGraphs(device) if device.type == "cuda" else cpu_graphs()
