"""Starts the worker from its settings: device, compatibility check, sizes, weights, warm-up, contents of Join.

Owns the order of start-up and its timed log lines. Knows nothing of sockets.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tandem.internal.v1 import worker_pb2 as pb
from transformers import PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.backends import captures_steps, graphs_for, runner_of
from gpu_worker.checkpoint.files import read_files, warn_of
from gpu_worker.checkpoint.linear import PackedLinear, can_pack
from gpu_worker.checkpoint.loading import load_weights, loads_to_device, weight_bytes
from gpu_worker.compatibility.check_model import check_cuda_shapes
from gpu_worker.compatibility.independence import check_independence, pin
from gpu_worker.compatibility.new_weights import WeightsLoader
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.geometry import Geometry, check_window
from gpu_worker.graphs import GraphBackend
from gpu_worker.group.failures import refusal_in_group
from gpu_worker.group.start import Collectives, Together, device_of_rank, least_sizes, part_of_rank, threads_of_rank
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.link.join_message import identity_of, join_message, texts
from gpu_worker.memory.costs import Costs
from gpu_worker.memory.device_memory import free_bytes, machine_of, resident_growth
from gpu_worker.memory.model_facts import check_same_computation, model_facts
from gpu_worker.memory.sizing import WHY_CAPPED, Measured, Sizes, check_host_memory, choose_sizes, ledger
from gpu_worker.native.library import leave_out_kernels
from gpu_worker.phases import log_slow_phase, phase
from gpu_worker.process.ranks import SINGLE, Ranks
from gpu_worker.process.threads import choose_or_follow, set_threads
from gpu_worker.settings import WorkerSettings
from gpu_worker.shared_pool.pool import WorkerPool
from gpu_worker.shared_pool.start import open_pool
from gpu_worker.step.runner import Runner
from gpu_worker.step.warm_up import full_plan
from gpu_worker.timings import take_timings
from gpu_worker.wire.frames import join_frame
from tandem_contract.plural import numbered

if TYPE_CHECKING:
    from gpu_worker.sharding.trial import PlanTrial

log = logging.getLogger(__name__)


def start(settings: WorkerSettings, folder: Path, ranks: Ranks = SINGLE) -> tuple[Runner, pb.Join, Together]:
    """The warm runner of the model in `folder`, or of this rank's part of it, its Join message, and the other ranks.

    Raises ModelRefused or ValueError, which name the setting and a valid value, and passes on errors of the machine.
    """
    device = device_of_rank(choose_device(settings.device), ranks)
    set_threads(settings.threads or (threads_of_rank(ranks) if ranks.is_group else None))
    if settings.native_kernels == "off":
        leave_out_kernels()
    usual = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, usual if settings.dtype == "auto" else settings.dtype)
    with phase("model files"):
        files = read_files(folder)
        # These are the largest parts of the Join; one that is too large is refused before weights are loaded.
        join_frame(pb.Join(**texts(files)))
    warn_of(files)
    with phase("compatibility check"):
        whole = model_facts(files.config, dtype=dtype, packs=(packs := can_pack(device, dtype)))
        facts, shared, trial = part_of_rank(files.config, whole, ranks, dtype, device, packs=packs)
        layers, costs, merged = facts.layers, facts.costs, facts.merged
        if device.type == "cuda":
            check_cuda_shapes(layers, dtype)
    length = settings.max_length or costs.default_length
    bound = with_window(settings, layers, length)
    reach = bound.within(length).reach
    sizes = plan_memory(settings, costs, device, reach)
    together = _meet(ranks, device, trial)
    with phase(f"weights, {costs.dtype} on {device}"):
        model = load_weights(files, device=device, dtype=dtype, merged=merged, shared=shared)
    sizes = least_sizes(sizes_of_loaded(settings, costs, sizes, device, reach), together)
    if device.type == "cpu" and settings.threads is None and not ranks.is_group:
        _choose_threads(model, settings, f"{files.folder} in {costs.dtype}")
    with phase("check that rows are independent"):
        pinned = pin(model, sizes.geometry.max_length)
        check_independence(model, sizes.geometry.max_length)
    for name in pinned:
        log.info("the rotary table of type %s is fixed for max_length %d", name, sizes.geometry.max_length)
    log.info("linear layers with a common input: %s merged", numbered(len(merged), "group", "are"))
    fuses = device.type == "cuda" and not ranks.is_group
    fused = settings.fused_layers == "on" or (settings.fused_layers == "auto" and fuses)
    # Collective calls are not among those that a CPU records.
    graphs = None if ranks.is_group and device.type == "cpu" else graphs_for(settings, device)
    with phase("identity"):
        hashed = identity_of(settings, files, sizes.geometry)
    pooled = settings.model_copy(update={"shared_pool": "off"}) if ranks.is_group else settings
    pool = open_pool(pooled, bound, sizes.geometry, dtype=dtype, device=device, identity=hashed)
    runner, measured = warm_runner(
        model, bound, sizes.geometry, device, dtype, graphs, costs.captures, fused=fused, pool=pool, together=together
    )
    with phase("self-check against eager attention"):
        error = check_runner(model, runner, dtype, unbounded=layers)
    same = partial(check_same_computation, files.config, dtype=dtype, packs=packs)
    loader = partial(WeightsLoader, check_config=same, ranks=ranks, agree=lambda ok: together.least([ok]) == [1])
    runner.weights = loader(model, files, runner, dtype=dtype, layers=layers)
    log.info("self-check passed: logits differ from eager attention's by %.2g", error)
    for line in ledger(sizes, str(device), costs.dtype, measured):
        log.info("%s", line)
    with phase("timing of prompts and page copies"):
        timings = take_timings(runner, together.of_leader)
    return runner, join_message(settings, files, runner, timings, identity=hashed, ranks=ranks), together


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


def with_window(settings: WorkerSettings, layers: LayerMap, max_length: int) -> LayerMap:
    """The layers with the window of the settings; layers that have their own stay unchanged. Raises ValueError."""
    window, sinks = settings.window, settings.window_sinks
    if window is None:
        return layers
    windows = [layer.kind.pattern.window for layer in layers.layers]
    if None not in windows:
        widest = max(width for width in windows if width is not None)
        raise ValueError(
            f"window is {window}; every layer of this model has its own window (the widest is {widest}), "
            "so the setting has no effect: leave it out"
        )
    check_window(window, sinks, max_length)
    return layers.bounded(window, sinks)


def _meet(ranks: Ranks, device: torch.device, trial: "PlanTrial | None") -> Together:
    """The other ranks, which have compared the plan if there is a trial. Raises ModelRefused."""
    together = Collectives(ranks, device) if ranks.is_group else Together()
    if trial is not None:
        with phase("comparison of a plan of ranks"):
            trial.run(ranks, together.least, device)
    return together


def _choose_threads(model: PreTrainedModel, settings: WorkerSettings, about: str) -> None:
    linears = [module for module in model.modules() if type(module) is PackedLinear and module.is_native]
    choose_or_follow(linears, settings, about)


def plan_memory(settings: WorkerSettings, costs: Costs, device: torch.device, reach: tuple[int, int] = (0, 0)) -> Sizes:
    """Chooses sizes that fit free memory and logs them. Raises ValueError."""
    machine = machine_of(settings, device)
    if device.type != "cpu" and not loads_to_device(device):
        check_host_memory(costs, machine.free_host)
    sizes = choose_sizes(settings, costs, machine, reach, captures=captures_steps(settings, device))
    for line in ledger(sizes, str(device), costs.dtype):
        log.info("%s", line)
    if sizes.is_capped:
        log.info("the KV pool is capped at %s: %s", numbered(sizes.geometry.num_pages, "page"), WHY_CAPPED)
    return sizes


def sizes_of_loaded(
    settings: WorkerSettings, costs: Costs, planned: Sizes, device: torch.device, reach: tuple[int, int] = (0, 0)
) -> Sizes:
    """Chooses sizes again on a GPU, because its context and other processes took memory while weights were loaded."""
    if device.type != "cuda":
        return planned
    now = machine_of(settings, device)
    free = min(planned.free, now.free + costs.weights)
    return choose_sizes(settings, costs, replace(now, free=free), reach, captures=captures_steps(settings, device))


def warm_runner(
    model: PreTrainedModel,
    layers: LayerMap,
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype,
    graphs: GraphBackend | None,
    captures: Callable[[StepShape], bool],
    *,
    fused: bool,
    pool: WorkerPool | None,
    together: Together,
) -> tuple[Runner, Measured]:
    """The runner with every kernel compiled and steps captured, and its measured memory, the largest step included.

    captures: whether a shape is captured. fused: decoder layers are compiled too. pool: the memory of the KV pool.
    together: agrees with the other ranks of a group.
    """
    before = _allocated(device)
    with phase("page pool and tables"):
        runner = runner_of(
            model,
            layers,
            geometry,
            device=device,
            dtype=dtype,
            graphs=graphs,
            captures=captures,
            fused=fused,
            pool=pool,
        )
        if together.is_group:
            runner.refusal_of = refusal_in_group
        runner.on_device.share_tokens = together.share_tokens
    pool_bytes = sum(tensor.nbytes for tensor in runner.on_device.cache.pools)
    # Torch does not count a shared pool.
    tables = _allocated(device) - before - (pool_bytes if pool is None else 0) if device.type == "cuda" else None
    if runner.steps.compiles or fused:
        log.info("compiling kernels in %s", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "a temporary folder"))
    with phase("warm-up"):
        runner.warm_up(log_slow_phase)
    if runner.on_device.fused is not None:
        log.info("%s", runner.on_device.fused.summary)
    if runner.steps.summary:
        log.info("%s", runner.steps.summary)
    with phase(f"largest step, {numbered(geometry.token_budget, 'token')}"), resident_growth(device) as grown:
        runner.rehearse(full_plan(geometry))
    return runner, Measured(
        weights=weight_bytes(model),
        step=grown[0] if grown else None,
        tables=tables,
        pool=pool_bytes,
        host_pool=runner.on_device.host.pages.nbytes,
        free=free_bytes(device),
        graphs=runner.steps.graphs.pool_bytes,
        num_graphs=runner.steps.graphs.num_graphs,
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
