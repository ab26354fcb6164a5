"""Whole steps with captured decode steps against the same steps without: tokens and logits have equal bits."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_worker.native.library import native_library
from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.rig import VOCAB_SIZE, Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS

pytestmark = pytest.mark.skipif(native_library() is None, reason="the kernels cannot be built here")


@pytest.fixture(autouse=True)
def on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a GPU captures by CUDA graphs")


# Llama; bfloat16 with a window; windows and soft-capping; experts and learned sinks; a bound window with sinks.
CAPTURED = [SPECS[0], SPECS[7], SPECS[8], SPECS[9], SPECS[10]]
_PROMPTS = {1: 5, 2: 30, 3: 47}


def _text(core: TinyCore, rig: Rig, seen: list[object]) -> None:
    """Rows start, decode across page ends, draw, leave and come back; what each step gives is added to `seen`."""
    draw = np.random.default_rng(3)
    for row, length in _PROMPTS.items():
        sampling = {"temperature": 1.0, "seed": 5} if row == 2 else {}
        core.add(row, draw.integers(4, VOCAB_SIZE, length).tolist(), **sampling)
        _step(core, rig, seen, chunks={row: length})
    for _ in range(20):
        _step(core, rig, seen, decode=[1, 2, 3])
    core.free(core.rows[2])
    for _ in range(5):
        _step(core, rig, seen, decode=[1, 3])
    core.add(2, draw.integers(4, VOCAB_SIZE, 20).tolist(), biases={7: 3.0})
    _step(core, rig, seen, chunks={2: 20}, decode=[1, 3])
    for _ in range(5):
        _step(core, rig, seen, decode=[3, 1, 2])


def _step(core: TinyCore, rig: Rig, seen: list[object], **what: object) -> None:
    outcome = rig.step(core, **what)
    logits = rig.runner.on_device.last_logits
    assert logits is not None
    seen.append((outcome.tokens.tolist(), logits.clone()))


def _compare(rig_of: Callable[[RigSpec], Rig], spec: RigSpec) -> Rig:
    rigs = [rig_of(spec), rig_of(replace(spec, graphs=True))]
    seen: list[list[object]] = [[], []]
    # Twice, because the graphs of the first text are replayed in the second.
    for _ in range(2):
        for rig, own in zip(rigs, seen, strict=True):
            _text(rig.core(), rig, own)
    assert len(seen[0]) > 60
    for i, ((tokens, logits), (own_tokens, own_logits)) in enumerate(zip(*seen, strict=True)):
        assert tokens == own_tokens, f"step {i + 1}"
        assert torch.equal(logits, own_logits), f"step {i + 1}"
    return rigs[1]


@pytest.mark.parametrize("spec", CAPTURED, ids=lambda spec: spec.family)
def test_replayed_steps_have_the_bits_of_ordinary_ones(rig_of: Callable[[RigSpec], Rig], spec: RigSpec):
    proven = _compare(rig_of, spec).runner.steps.graphs
    assert proven.is_enabled
    # Two and three rows; 60 decode steps, of which two of each number are not replays.
    assert proven.num_graphs >= 2
    assert proven.num_replays >= 50


def _counted(x: torch.Tensor, calls: list[int]) -> torch.Tensor:
    """Adds the number of calls so far: a replay would add that of the capture."""
    calls.append(1)
    return x + len(calls) * 1e-3


def _read(x: torch.Tensor, calls: list[int]) -> torch.Tensor:
    """Reads a value."""
    calls.append(1)
    return x * (1 if x.max().item() > 1e9 else 1.5)


@pytest.mark.parametrize("change", [_counted, _read])
def test_a_model_that_a_graph_would_serve_wrong_has_none(change: Callable[[torch.Tensor, list[int]], torch.Tensor]):
    rig = Rig(replace(CAPTURED[0], graphs=True, max_rows=2), torch.device("cpu"))
    norm, calls = rig.served.base_model.norm, []
    own = norm.forward
    norm.forward = lambda x: change(own(x), calls)
    proven = rig.runner.steps.graphs
    # As if the model had always been so: the warm-up has captured steps of the other one.
    proven._captured.clear()
    before = proven.num_replays
    core = rig.core()
    core.add(1, [5, 6, 7])
    _step(core, rig, [], chunks={1: 3})
    for _ in range(4):
        _step(core, rig, [], decode=[1])
    assert (proven.num_graphs, proven.num_replays) == (0, before)
    assert len(calls) >= 5
