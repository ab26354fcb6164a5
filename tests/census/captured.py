"""Decode steps of a model that a CPU has captured: they have the bits of ordinary ones.

Owns the short text that is run both ways.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.cuda.graphs import CapturedSteps
from gpu_worker.cuda.steps import PaddedSteps
from gpu_worker.step.runner import Runner
from tests.census.shrink import LAST_SPECIAL_TOKEN, PAD_TOKEN
from tests.census.trial import Mismatch
from tests.gpu_worker.plans import TinyCore

# The first is captured, the second proven.
_NUM_STEPS = 6


@contextmanager
def without_captured_steps(runner: Runner) -> Iterator[None]:
    """Within it, steps run as usual."""
    steps = runner.steps
    if isinstance(steps, PaddedSteps):
        eager = patch.object(steps, "graphs", CapturedSteps(None))
    else:
        eager = patch.object(steps.graphs, "run", lambda shape, inputs: steps._static(inputs))
    with eager:
        yield


def num_replays(runner: Runner) -> int:
    """The captured steps of a short text; 0 if the model's cannot be captured. Raises Mismatch."""
    proven = runner.steps.graphs
    if not proven.is_enabled:
        return 0
    begun = proven.num_replays
    captured = _logits(runner, generation=1001)
    with without_captured_steps(runner):
        ordinary = _logits(runner, generation=1002)
    for i, (one, other) in enumerate(zip(captured, ordinary, strict=True)):
        if not torch.equal(one, other):
            raise Mismatch(f"step {i + 1} has other logits if decode steps are captured")
    return proven.num_replays - begun


def _logits(runner: Runner, generation: int) -> list[Tensor]:
    core = TinyCore(runner.geometry, generation=generation)
    core.add(1, [PAD_TOKEN + 1 + i % (LAST_SPECIAL_TOKEN - PAD_TOKEN - 1) for i in range(13)])
    found: list[Tensor] = []
    for chunks, decode in (({1: 13}, []), *(({}, [1]),) * _NUM_STEPS):
        runner.submit(core.plan(chunks=chunks, decode=decode))
        outcome = runner.collect()
        assert outcome is not None
        if outcome.status != pb.STEP_STATUS_OK:
            raise Mismatch(f"a step ended {outcome.status}: {outcome.detail}")
        core.learn(outcome.tokens)
        logits = runner.on_device.last_logits
        assert logits is not None
        found.append(logits.clone())
    return found
