"""Takes one class of Transformers, made tiny and saved, through the worker's own start: it is served, refused or fails.

Owns the order, which is that of gpu_worker/startup.py. Only the worker's ModelRefused counts as a refusal.
"""

import logging
import tempfile
import traceback
import warnings
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.backends import runner_of
from gpu_worker.checkpoint.files import ModelRefused, read_files
from gpu_worker.checkpoint.linear import Groups
from gpu_worker.checkpoint.loading import load_weights
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.compatibility.independence import check_independence, pin
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.cpu.graphs import cpu_graphs
from gpu_worker.memory.model_facts import shared_inputs
from tests.census.captured import num_replays, without_captured_steps
from tests.census.hints import HINTS, UNBUILDABLE
from tests.census.population import Member
from tests.census.reference import Reference
from tests.census.shrink import MAX_LENGTH, tiny_config
from tests.census.trial import Verdict, geometry_for, run_trial
from tests.census.weights import random_eager


class Result(StrEnum):
    """The result of one class."""

    SERVED = "served"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One class: its kind of attention if it is served, else the reason for the refusal; and details."""

    member: Member
    result: Result
    kind: str
    detail: str


def run_case(member: Member, device: torch.device, dtype: torch.dtype = torch.float32) -> Outcome:
    """Runs one class. Never raises: every exception except ModelRefused is a failure."""
    try:
        config = tiny_config(member.config_class, HINTS.get(member.model_type, {}))
        layers, verdict = serve(config, device, dtype)
    except ModelRefused as error:
        kind, _, detail = str(error).partition(": ")
        # Reasons that a wrong hint would cause too.
        suspicious = kind.startswith(("the model cannot be built", "the model does not run"))
        expected = detail.startswith(UNBUILDABLE.get(member.model_type, ()))
        result = Result.FAILED if suspicious and not expected else Result.REFUSED
        return Outcome(member=member, result=result, kind=kind, detail=detail)
    except Exception as error:
        return Outcome(member=member, result=Result.FAILED, kind=type(error).__name__, detail=place_and_line(error))
    detail = f"errors are {verdict.ratio:.2f} of what is allowed"
    if verdict.near_ties:
        detail += f"; at {verdict.near_ties} positions rounding alone decides, of eager attention too"
    if device.type == "cpu":
        detail += "; decode steps are captured" if verdict.replays else "; decode steps are not captured"
    return Outcome(member=member, result=Result.SERVED, kind=describe(layers), detail=detail)


def place_and_line(error: Exception) -> str:
    """Where an error was raised, and the first line of its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{Path(frame.filename).name}:{frame.lineno}: {first}"


def quiet() -> None:
    """Leaves out what Transformers and torch say of tiny models."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def serve(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, max_length: int = MAX_LENGTH
) -> tuple[LayerMap, Verdict]:
    """The layers of a model that matches eager attention, and how well it does."""
    meta_model = meta_model_of(config, dtype=dtype)
    layers, merged = check_model(meta_model), shared_inputs(meta_model)
    eager = random_eager(config, dtype).to(device)
    model = _saved_and_loaded(eager, config, device, dtype, merged)
    geometry = geometry_for(max_length)
    pin(model, geometry.max_length)
    check_independence(model, geometry.max_length)
    graphs = cpu_graphs() if device.type == "cpu" else None
    runner = runner_of(model, layers, geometry, device=device, dtype=dtype, graphs=graphs)
    runner.warm_up()
    check_runner(model, runner, dtype)
    # The trial sees hidden states, and a replay runs no Python that could show them.
    with without_captured_steps(runner):
        verdict = run_trial(model, runner, Reference(eager, max_length=max_length))
    return layers, replace(verdict, replays=num_replays(runner))


def _saved_and_loaded(
    model: PreTrainedModel, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, merged: Groups
) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        # As published: the text part of a larger model has the config of the whole.
        config.save_pretrained(folder)
        return load_weights(read_files(folder), device=device, dtype=dtype, merged=merged)


def describe(layers: LayerMap) -> str:
    """The kinds of attention of the layers, in a few words."""
    parts: list[str] = []
    kinds = layers.kinds
    if any(kind.pattern.window is not None for kind in kinds):
        every = all(kind.pattern.window is not None for kind in kinds)
        parts.append("sliding windows" if every else "sliding windows and full attention")
    else:
        parts.append("full attention")
    if any(kind.softcap is not None for kind in kinds):
        parts.append("soft-capping")
    if any(kind.pattern.has_learned_sinks for kind in kinds):
        parts.append("sinks")
    if any(kind.key_dim != kind.value_dim for kind in kinds):
        parts.append("keys and values of different dimensions")
    return ", ".join(parts)
