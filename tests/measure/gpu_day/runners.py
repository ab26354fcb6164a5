"""A warm runner of a random model in this process: what a worker process has without its link.

Owns the choice of sizes and the one place that says how captured graphs are switched on and off.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.attention.layers import LayerMap
from gpu_worker.backends import runner_of
from gpu_worker.checkpoint.linear import PackedLinear, can_pack
from gpu_worker.compatibility.check_model import check_cuda_shapes
from gpu_worker.compatibility.independence import pin
from gpu_worker.cuda.graphs import CudaGraphs
from gpu_worker.geometry import Geometry, default_chunk_align
from gpu_worker.memory.model_facts import examine
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import plan_memory
from gpu_worker.step.runner import Runner
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import TINY_MODEL, TINY_SIZES, config_of, random_model, save_model
from tests.rigs.graph_recorder import GraphRecorder
from tests.rigs.padded_shapes import few_shapes, padded_runner

# Compiled code and packed weights, which the recorder takes as one operator each.
_OPAQUE = ((FlexKernel, "__call__"), (PackedLinear, "forward"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model and its runner."""

    model: PreTrainedModel
    runner: Runner
    layers: LayerMap
    dtype: torch.dtype

    @property
    def geometry(self) -> Geometry:
        return self.runner.geometry


def serve(
    day: Day,
    config: PreTrainedConfig,
    *,
    dtype: str = "",
    graphs: bool | None = None,
    **sizes: int,
) -> Served:
    """A warm runner. dtype: the day's by default. Without `num_pages` the pool has pages for every row, if they fit.

    graphs: None is what a worker does, which captures on a GPU alone. sizes: settings of a worker.
    """
    device, torch_dtype = torch.device(day.device), getattr(torch, dtype or day.dtype)
    facts = examine(config, dtype=torch_dtype, packs=can_pack(device, torch_dtype))
    model, layers = random_model(config, facts, device, torch_dtype), facts.layers
    if device.type == "cuda":
        check_cuda_shapes(layers, torch_dtype)
    settings = WorkerSettings(device=day.device, **sizes)
    pin(model, settings.max_length)
    geometry = plan_memory(settings, facts.costs, device).geometry
    captures = not day.on_cpu if graphs is None else graphs
    runner = _runner(model, layers, geometry, device, torch_dtype, graphs=captures)
    runner.warm_up(lambda name, seconds: print(f"  {name}: {seconds:.1f} s", flush=True))
    return Served(model=model, runner=runner, layers=layers, dtype=torch_dtype)


def warm(day: Day, shape: str, sizes: dict[str, int], **options: Any) -> Served:
    """A warm runner of this shape and sizes; in a tiny run both are tiny. Options: as those of `serve`."""
    with day.phase("a warm runner"):
        return serve(day, _config(day, shape), **(TINY_SIZES if day.tiny else sizes), **options)


def checkpoint(day: Day, shape: str) -> Path:
    """The folder of a model of this shape, or of a tiny one."""
    with day.phase("a checkpoint"):
        folder = day.scratch / "model"
        save_model(_config(day, shape), folder, torch.device(day.device), getattr(torch, day.dtype))
        free_memory(day.device)
        return folder


def _config(day: Day, shape: str) -> PreTrainedConfig:
    return config_of(TINY_MODEL if day.tiny else shape)


def _runner(
    model: PreTrainedModel,
    layers: LayerMap,
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool,
) -> Runner:
    """A runner that is not warm yet, with padded steps. On a CPU graphs are recorded operators."""
    if device.type == "cpu":
        recorder = GraphRecorder(opaque=_OPAQUE, transparent=["tandem::attend"]) if graphs else None
        shapes = few_shapes(geometry, geometry.max_rows)
        return padded_runner(model, layers, geometry, device=device, dtype=dtype, shapes=shapes, graphs=recorder)
    backend = CudaGraphs(device) if graphs else None
    return runner_of(model, layers, geometry, device=device, dtype=dtype, graphs=backend, fused=True)


def cold_runner(day: Day, config: PreTrainedConfig, *, max_rows: int, **sizes: int) -> Runner:
    """An eager runner of this geometry that is not warm: a kernel compiles at its first call."""
    device, dtype = torch.device(day.device), getattr(torch, day.dtype)
    facts = examine(config, dtype=dtype, packs=can_pack(device, dtype))
    model = random_model(config, facts, device, dtype)
    chunk_align = default_chunk_align(on_cpu=day.on_cpu)
    geometry = Geometry(
        max_rows=max_rows,
        token_budget=max_rows + chunk_align,
        chunk_align=chunk_align,
        vocab_size=config.vocab_size,
        **sizes,
    )
    return _runner(model, facts.layers, geometry, device, dtype, graphs=False)


def free_memory(device: str) -> None:
    """Returns memory that the caller no longer refers to, so that another process of the machine can use it."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
