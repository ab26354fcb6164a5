"""Errors of capture and replay, put into the worker's code: each is caught, by the recorder or by comparison."""

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.cuda.graphs import CapturedSteps
from gpu_worker.cuda.staging import Staging
from gpu_worker.cuda.steps import PaddedSteps
from gpu_worker.layout.step_layout import StepInputs, StepShape
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.output import StaticOutput
from tests.gpu_worker.cuda import scenarios
from tests.gpu_worker.cuda.rig import GraphRig, Observed, Scenario

Eager = Callable[[Scenario], Sequence[Observed]]
Patch = pytest.MonkeyPatch


def stale_positions(patch: Patch, rig: GraphRig) -> None:
    """The forward takes positions from the host's arrays."""
    upload, logits = Staging.upload, DeviceModel.logits
    host: list[Any] = []

    def remembering(staging: Staging, inputs: Any, extras: Any) -> Any:
        host[:] = [] if inputs is None else [inputs.positions]
        return upload(staging, inputs, extras)

    def baked(model: DeviceModel, inputs: StepInputs[Tensor], context: Any) -> Any:
        return logits(model, dataclasses.replace(inputs, positions=torch.from_numpy(host[0])), context)

    patch.setattr(Staging, "upload", remembering)
    patch.setattr(DeviceModel, "logits", baked)


def stale_number_of_rows(patch: Patch, rig: GraphRig) -> None:
    """Python counts the rows of the step, and leaves out the newest tokens of padding."""
    upload, call = Staging.upload, PaddedSteps._static_part
    num_rows = [0]

    def counting(staging: Staging, inputs: Any, extras: Any) -> Any:
        num_rows[0] = 0 if inputs is None or inputs.decode is None else int((inputs.decode.rows > 0).sum())
        return upload(staging, inputs, extras)

    def cut(steps: PaddedSteps, inputs: StepInputs[Tensor]) -> StaticOutput:
        inputs.token_ids[num_rows[0] :].clamp_(min=0)
        return call(steps, inputs)

    patch.setattr(Staging, "upload", counting)
    patch.setattr(PaddedSteps, "_static_part", cut)


def value_on_the_host(patch: Patch, rig: GraphRig) -> None:
    """The static part asks the device how many tokens it must fill in."""
    call = PaddedSteps._static_part

    def asking(steps: PaddedSteps, inputs: StepInputs[Tensor]) -> StaticOutput:
        if (inputs.token_ids < 0).any():
            inputs.token_ids.clamp_(max=inputs.token_ids.shape[0] + 1_000)
        return call(steps, inputs)

    patch.setattr(PaddedSteps, "_static_part", asking)


def _moving_buffer(patch: Patch, rig: GraphRig, *, keeps: bool) -> None:
    place, shapes = Staging.inputs, rig.runner.steps.shapes.steps
    kept: list[Tensor] = []

    def moving(staging: Staging, shape: StepShape, allocate: Any) -> Any:
        if shape.prefill and rig.graphs.num_graphs == len(shapes):
            if keeps:
                kept.append(staging._buffer)
            staging._buffer = staging._buffer.clone()
            staging._placed.clear()
            staging._current = None
        return place(staging, shape, allocate)

    patch.setattr(Staging, "inputs", moving)


def moved_staging_buffer(patch: Patch, rig: GraphRig) -> None:
    """The staging buffer is allocated again for steps with chunks; the memory of the old one is kept."""
    _moving_buffer(patch, rig, keeps=True)


def freed_staging_buffer(patch: Patch, rig: GraphRig) -> None:
    """The staging buffer is allocated again for steps with chunks, and nothing keeps the old one."""
    _moving_buffer(patch, rig, keeps=False)


def newest_tokens_of_another_stream(patch: Patch, rig: GraphRig) -> None:
    """The newest tokens are written by work that the capturing stream does not have."""
    call = PaddedSteps._static_part

    def beside(steps: PaddedSteps, inputs: StepInputs[Tensor]) -> StaticOutput:
        newest = steps._on_device.tables.newest_token
        before = newest.clone()
        output = call(steps, inputs)
        written = newest.clone()
        newest.copy_(before)

        @torch.inference_mode()
        def write() -> None:
            newest.copy_(written)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return output

    patch.setattr(PaddedSteps, "_static_part", beside)


class TokensByTheHost:
    """Stands for the table of newest tokens; the host fills in or keeps the tokens instead of the device."""

    def __init__(self, rig: GraphRig, *, feeds: bool) -> None:
        """feeds: the host fills in the ids of decode rows; otherwise it keeps the tokens of a step."""
        on_device = rig.runner.on_device
        self._newest, self._feeds = on_device.tables.newest_token, feeds
        self._memory = self._newest.numpy()
        self._nothing = torch.zeros_like(self._newest)
        # The rows of the step's decode part, and the memory of its ids.
        self.rows: Any = None
        self.ids: Any = None

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        if not self._feeds:
            return self._newest.index_select(dim, rows)
        ids = self.ids[: self.rows.size]
        ids[:] = np.where(ids < 0, self._memory[self.rows], ids)
        return self._nothing.index_select(dim, rows)

    def index_copy_(self, dim: int, rows: Tensor, tokens: Tensor) -> None:
        if self._feeds:
            self._newest.index_copy_(dim, rows, tokens)
        else:
            self._memory[rows.numpy()] = tokens.numpy()


def feed_by_the_host(patch: Patch, rig: GraphRig) -> None:
    """Numpy writes the newest tokens into the ids of the step."""
    table, upload = TokensByTheHost(rig, feeds=True), Staging.upload

    def remembering(staging: Staging, inputs: Any, extras: Any) -> Any:
        table.rows = None if inputs is None or inputs.decode is None else inputs.decode.rows
        uploaded = upload(staging, inputs, extras)
        table.ids = None if inputs is None else uploaded[0].token_ids.numpy()
        return uploaded

    patch.setattr(Staging, "upload", remembering)
    patch.setattr(rig.runner.on_device.tables, "newest_token", table)


def tokens_by_the_host(patch: Patch, rig: GraphRig) -> None:
    """Numpy writes the tokens of the step into the table of newest tokens."""
    table = TokensByTheHost(rig, feeds=False)
    patch.setattr(rig.runner.on_device.tables, "newest_token", table)


def results_that_are_not_copied(patch: Patch, rig: GraphRig) -> None:
    """The tokens of a step stay in the graph's memory until their outcome is collected."""
    patch.setattr(rig.runner.steps.results, "to_host", lambda output: output)


def _bucket_of(patch: Patch, rig: GraphRig, more: int) -> None:
    replay = CapturedSteps.replay
    shapes = {(shape.decode, shape.draws): shape for shape in rig.runner.steps.shapes.steps if not shape.prefill}

    def off_by_one(steps: CapturedSteps, shape: StepShape) -> Any:
        other = None if shape.prefill else shapes.get((shape.decode + more, shape.draws))
        return replay(steps, other or shape)

    patch.setattr(CapturedSteps, "replay", off_by_one)


def smaller_bucket(patch: Patch, rig: GraphRig) -> None:
    """A step is replayed by the graph of the next smaller bucket."""
    _bucket_of(patch, rig, -1)


def larger_bucket(patch: Patch, rig: GraphRig) -> None:
    """A step is replayed by the graph of the next larger bucket."""
    _bucket_of(patch, rig, 1)


def graph_of_other_draws(patch: Patch, rig: GraphRig) -> None:
    """A step in which rows draw is replayed by the graph of greedy steps."""
    replay = CapturedSteps.replay

    def greedy(steps: CapturedSteps, shape: StepShape) -> Any:
        return replay(steps, shape if shape.prefill else dataclasses.replace(shape, draws=False))

    patch.setattr(CapturedSteps, "replay", greedy)


# How each is caught, as a regular expression.
MUTATIONS: dict[Callable[[Patch, GraphRig], None], str] = {
    # The memory may have been freed meanwhile; an arbitrary position has no finite rotation.
    stale_positions: "other (tokens|logits)|nonfinite",
    stale_number_of_rows: "other (tokens|logits)",
    value_on_the_host: "not captured",
    moved_staging_buffer: "other (tokens|logits)|IndexError",
    freed_staging_buffer: "DanglingMemory",
    newest_tokens_of_another_stream: "other (tokens|logits)",
    feed_by_the_host: "other (tokens|logits)|IndexError",
    tokens_by_the_host: "not captured",
    results_that_are_not_copied: "failed",
    smaller_bucket: "failed|other",
    larger_bucket: "failed|other",
    graph_of_other_draws: "failed|other",
}


# One of each sort runs by default.
SHORT = (stale_positions, freed_staging_buffer, newest_tokens_of_another_stream, smaller_bucket)


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, marks=[] if one in SHORT else [pytest.mark.long]) for one in MUTATIONS],
    ids=lambda mutation: mutation.__name__,
)
def test_a_mutation_is_caught(
    graph_rig: GraphRig, eager: Eager, monkeypatch: Patch, mutation: Callable[[Patch, GraphRig], None]
) -> None:
    scenario = scenarios.two_in_flight if mutation is results_that_are_not_copied else scenarios.every_shape
    truth, staging = eager(scenario), graph_rig.runner.steps._staging
    with monkeypatch.context() as patch:
        # What a mutation changes here is undone too.
        patch.setattr(staging, "_buffer", staging._buffer.clone())
        patch.setattr(staging, "_placed", {})
        mutation(patch, graph_rig)
        graph_rig.capture()
        flaw = graph_rig.flaw(scenario, truth)
    assert re.search(MUTATIONS[mutation], flaw), flaw
