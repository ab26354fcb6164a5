"""What runs the steps of a device: the one choice between those of a GPU and those of a CPU."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.cpu.forwards import restore_forwards
from gpu_worker.geometry import Geometry
from gpu_worker.graphs import GraphBackend
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.native.library import native_library
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool.pool import WorkerPool
from gpu_worker.step.backend import StepBackend
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.runner import Runner


def runner_of(
    model: PreTrainedModel,
    layers: LayerMap,
    geometry: Geometry,
    *,
    device: torch.device,
    dtype: torch.dtype,
    graphs: GraphBackend | None = None,
    captures: Callable[[StepShape], bool] = lambda _: True,
    native: bool = True,
    fused: bool = False,
    pool: WorkerPool | None = None,
) -> Runner:
    """The runner of a model, which is not warm yet.

    graphs: captures steps, if `captures` holds for their shape; None: every step runs eagerly. native: whether
    attention on a CPU may use C++ kernels. fused: decoder layers compile during the warm-up. pool: the memory of the KV
    pool; by default it ends with the process.
    """
    on_device = DeviceModel(model, layers, geometry, device=device, dtype=dtype, memory=pool)
    if fused:
        from gpu_worker.step.fused_layers import FusedLayers

        restore_forwards(model)
        on_device.fused = FusedLayers(model)
    steps: StepBackend
    if device.type == "cpu":
        from gpu_worker.cpu.steps import PlainSteps

        # Compiled layers cannot be captured there.
        steps = PlainSteps(on_device, graphs=None if fused else graphs, captures=captures, native=native)
    else:
        # FlexAttention takes seconds to import, and needs a compiler.
        from gpu_worker.cuda.shapes import Shapes
        from gpu_worker.cuda.staging import Stream
        from gpu_worker.cuda.steps import PaddedSteps

        steps = PaddedSteps(on_device, Shapes.of(geometry), Stream(), graphs=graphs, captures=captures)
    return Runner(on_device, steps, pool=pool)


def captures_steps(settings: WorkerSettings, device: torch.device) -> bool:
    """Whether this device captures steps. On a CPU without C++ kernels a graph would save nothing."""
    if settings.graphs == "off":
        return False
    return device.type == "cuda" or (device.type == "cpu" and native_library() is not None)


def graphs_for(settings: WorkerSettings, device: torch.device) -> GraphBackend | None:
    if not captures_steps(settings, device):
        return None
    if device.type == "cuda":
        from gpu_worker.cuda.graphs import CudaGraphs

        return CudaGraphs(device)
    from gpu_worker.cpu.graphs import cpu_graphs

    return cpu_graphs()
