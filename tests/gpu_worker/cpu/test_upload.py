"""A CPU's steps read their inputs where the host wrote them, decode rows always at the same addresses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpu_worker.cpu.steps import PlainSteps
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.trees import leaves
from tests.gpu_worker.rig import Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS


@pytest.fixture(scope="module")
def steps(rig_of: Callable[[RigSpec], Rig], device: torch.device) -> PlainSteps:
    if device.type != "cpu":
        pytest.skip("a GPU has steps of its own")
    return rig_of(SPECS[0]).runner.steps


def addresses(arrays: list[np.ndarray] | list[torch.Tensor]) -> list[int]:
    return [one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data for one in arrays if one.size]


def shape_of(rows: int, prefill: int = 0) -> StepShape:
    return StepShape(decode=rows, prefill=prefill, tokens=rows + prefill, samples=rows, draws=True)


@pytest.mark.parametrize("need", [shape_of(1), shape_of(3), shape_of(1, 32)], ids=str)
def test_nothing_is_copied(steps: PlainSteps, need: StepShape) -> None:
    shape, inputs = steps.inputs_of(need)
    assert not shape.draws and (shape.decode, shape.prefill) == (need.decode, need.prefill)
    extras = (np.arange(5), np.ones(3, np.float32))
    on_device, others = steps.upload(inputs, extras)
    inputs.token_ids[:], extras[0][:] = 7, 8
    assert addresses(leaves(on_device)) == addresses(leaves(inputs)) and addresses(list(others)) == addresses([*extras])
    assert on_device.token_ids.tolist() == [7] * shape.tokens and others[0].tolist() == [8] * 5
    assert steps.upload(None, extras)[0] is None


def test_decode_rows_of_one_number_have_one_place(steps: PlainSteps) -> None:
    """Captured calls read there."""
    first = steps.upload(steps.inputs_of(shape_of(2))[1], None)[0]
    steps.upload(steps.inputs_of(shape_of(3))[1], None)
    assert steps.upload(steps.inputs_of(shape_of(2))[1], None)[0] is first
    chunks = [steps.upload(steps.inputs_of(shape_of(1, 32))[1], None)[0] for _ in range(2)]
    assert not set(addresses(leaves(chunks[0]))) & set(addresses(leaves(chunks[1])))
