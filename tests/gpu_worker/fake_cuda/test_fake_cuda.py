"""Steps on a CUDA device, without one: what waits, what crosses, and that a graph can replay the static part."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gpu_worker.constraints.rows import ConstrainedRow, Prepared
from gpu_worker.step.constrained import ConstrainedSteps
from tests.gpu_worker.fake_cuda.fake_device import CUDA, FakeCuda
from tests.gpu_worker.fake_cuda.rig import GEOMETRY, NUM_LAYERS, FakeRig
from tests.gpu_worker.fake_cuda.trace import Crossing, Trace, difference, launches

# Launches per layer beside those of the two attention kernels. Lower it when layers need fewer.
MAX_LAUNCHES_PER_LAYER = 55
# And those of a step besides its layers: masks, ids, embedding, head, tokens.
MAX_OTHER_LAUNCHES = 40
# The parameters of rows that draw, and of those that need more than the static part.
DRAWING: tuple[dict[str, float], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1, "top_k": 20},
    {"temperature": 1, "top_k": 5_000},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 1, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "seed": 5},
)
SPECIAL: tuple[dict[str, float], ...] = (
    {"temperature": 1, "typical_p": 0.5},
    {"temperature": 0, "presence_penalty": 1, "repetition_penalty": 1.5},
    {"temperature": 0, "num_logprobs": 4},
)
TO_DEVICE = Crossing(operator="aten.copy_.default", to_device=True, waits=False)
TO_HOST = Crossing(operator="aten.copy_.default", to_device=False, waits=False)


@pytest.fixture(scope="module")
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture(scope="module")
def rig(fake: FakeCuda) -> FakeRig:
    return FakeRig(fake)


def decode_steps(rig: FakeRig, rows: Sequence[dict[str, float]], count: int) -> list[Trace]:
    """The traces of consecutive decode steps of rows with these parameters, each in the middle of a page."""
    core = rig.core({})
    for row, sampling in enumerate(rows, start=1):
        core.add(row, [row] * 20, position=19, **sampling)
    return [rig.step(core, decode=list(core.rows)) for _ in range(count)]


@pytest.fixture(scope="module")
def drawing_step(rig: FakeRig) -> Trace:
    """A decode step of 8 rows that draw, in the bucket of 8 rows."""
    return decode_steps(rig, [{"temperature": 0.7}] * 8, 1)[0]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "tolist": lambda x: x.tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_fake_device_refuses_what_waits(fake: FakeCuda, name: str) -> None:
    with fake.present(), pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        WAITS[name](torch.zeros(3, device=CUDA))


def test_the_fake_device_sees_copies_that_wait(fake: FakeCuda) -> None:
    with fake.present():
        trace, on_device = fake.start_trace(), torch.zeros(3, device=CUDA)
        locked, pageable = torch.zeros(3, pin_memory=True), torch.zeros(3)
        locked.numpy()[:] = 1
        on_device.copy_(locked, non_blocking=True)
        on_device.copy_(locked)
        on_device.copy_(pageable, non_blocking=True)
        locked.copy_(on_device, non_blocking=True)
        on_device.cpu()
        torch.zeros(3).to(CUDA)
    assert [(crossing.to_device, crossing.waits) for crossing in trace.crossings] == [
        *((True, False), (True, True), (True, True), (False, False), (False, True), (True, True))
    ]
    assert locked.tolist() == [1, 1, 1]


def test_traces_tell_storages_and_numbers_apart(fake: FakeCuda) -> None:
    with fake.present():
        held, other = torch.zeros(3, device=CUDA), torch.zeros(3, device=CUDA)

        def traced(run: Callable[[], object]) -> Trace:
            trace = fake.start_trace()
            with trace.static():
                run()
            return trace

        first = traced(lambda: (held[1:] + 1) * 2).static_part
        assert difference(first, traced(lambda: (held[1:] + 1) * 2).static_part) == ""
        assert launches(first) == ["aten.add.Tensor", "aten.mul.Tensor"]
        for run in (
            lambda: (other[1:] + 1) * 2,
            lambda: (held[:2] + 1) * 2,
            lambda: (held[1:] + 2) * 2,
            lambda: held[1:] + 1,
        ):
            assert difference(first, traced(run).static_part) != ""


def test_a_decode_step_is_the_same_work_for_all_parameters(rig: FakeRig, drawing_step: Trace) -> None:
    _, trace = decode_steps(rig, DRAWING, 2)
    assert difference(drawing_step.static_part, trace.static_part) == ""
    assert trace.crossings == [TO_DEVICE, TO_HOST]
    # Besides the static part a step has only these copies.
    assert launches(trace.rest) == ["aten.copy_.default"] * 2


def test_a_greedy_decode_step_has_work_of_its_own(rig: FakeRig, drawing_step: Trace) -> None:
    first, second = decode_steps(rig, [{"temperature": 0}] * 8, 2)
    assert difference(drawing_step.static_part, second.static_part) != ""
    assert difference(first.static_part, second.static_part) == ""
    assert second.crossings == [TO_DEVICE, TO_HOST]
    assert launches(second.rest) == ["aten.copy_.default"] * 2


def test_special_samples_change_nothing_in_the_static_part(rig: FakeRig, drawing_step: Trace) -> None:
    (trace,) = decode_steps(rig, [{"temperature": 0.7}] * 3 + list(SPECIAL), 1)
    assert difference(drawing_step.static_part, trace.static_part) == ""
    # FakeTensorMode has refused every wait. One copy goes to the device, several to the host, because of the logprobs.
    assert [crossing.to_device for crossing in trace.crossings].count(True) == 1
    assert not any(crossing.waits for crossing in trace.crossings)
    assert len(launches(trace.rest)) > 2


@pytest.mark.parametrize("size", [1, 48, GEOMETRY.max_rows])
def test_every_number_of_rows_in_a_bucket_is_the_same_work(rig: FakeRig, size: int) -> None:
    buckets = rig.runner.steps.shapes.decode_buckets
    assert size in buckets
    fewest = max((bucket + 1 for bucket in buckets if bucket < size), default=1)
    least, most = (decode_steps(rig, [{"temperature": 0}] * count, 1)[0] for count in (fewest, size))
    assert difference(least.static_part, most.static_part) == ""


def test_mixed_steps_of_one_shape_are_the_same_work(rig: FakeRig) -> None:
    traces: list[Trace] = []
    for lengths, chunks in (((20,), (128, 90)), ((20, 300, 5000), (1, 2, 3)), ((129, 1), (400,))):
        core = rig.core(dict(enumerate(lengths, start=1)))
        for row, length in enumerate(chunks, start=50):
            core.add(row, [1] * length)
        traces.append(rig.step(core, chunks=dict(enumerate(chunks, start=50)), decode=range(1, len(lengths) + 1)))
    for trace in traces:
        assert difference(traces[0].static_part, trace.static_part) == ""
        assert trace.crossings == [TO_DEVICE, TO_HOST]


def test_an_appended_page_adds_work_outside_the_static_part(rig: FakeRig) -> None:
    rows = range(1, 5)
    core = rig.core(dict.fromkeys(rows, GEOMETRY.page_size))
    # Rows start, then each gets a page, then they continue in it.
    steps = [rig.step(core, decode=rows) for _ in range(3)]
    assert [len(core.rows[row].pages) for row in rows] == [2] * 4
    for step in steps[1:]:
        assert difference(steps[0].static_part, step.static_part) == ""
        assert step.crossings == [TO_DEVICE, TO_HOST]
    assert [len(launches(step.rest)) for step in steps] == [6, 6, 2]


def test_memory_that_moves_between_steps_is_noticed(rig: FakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = rig.runner.on_device.tables
    core = rig.core({1: 20})
    before = rig.step(core, decode=[1])
    with rig.fake.present():
        copy = tables.newest_token.clone()
    with monkeypatch.context() as moved:
        moved.setattr(tables, "newest_token", copy)
        after = rig.step(core, decode=[1])
    assert difference(before.static_part, after.static_part) != ""


def test_launches_per_layer_stay_under_the_bar(drawing_step: Trace) -> None:
    names = launches(drawing_step.static_part)
    # From one layer's activation to the next one's is one layer's work.
    ends = [i for i, name in enumerate(names) if name == "aten.silu.default"]
    assert len(ends) == NUM_LAYERS == 2
    per_layer = ends[1] - ends[0]
    assert per_layer <= MAX_LAUNCHES_PER_LAYER
    assert len(names) - NUM_LAYERS * per_layer <= MAX_OTHER_LAUNCHES


class EveryToken:
    """In place of a worker's constraints: masks that are there at once."""

    def start(self, row: int, hash_: bytes, output_tokens: object) -> None: ...

    def forget_rows(self) -> None: ...

    def row(self, row: int) -> ConstrainedRow:
        constraint = Prepared(id=1, hash=b"", source=b"")
        return ConstrainedRow(row=row, start=1, constraint=constraint, num_tokens=0)

    def are_masked(self, rows: Sequence[ConstrainedRow]) -> bool:
        return True

    def masks(self, rows: Sequence[ConstrainedRow], into: NDArray[np.int32]) -> None:
        into[:] = -1

    def learn(self, sampled: object) -> None: ...


def test_masks_reach_the_device_by_one_more_copy_that_waits_for_nothing(
    rig: FakeRig, fake: FakeCuda, drawing_step: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the static part stays the one that graphs replay."""
    words = -(-GEOMETRY.vocab_size // 32)
    with fake.present():
        upload = rig.runner.steps.mask_upload(max_rows=GEOMETRY.max_rows, mask_words=words)
    constraints = ConstrainedSteps(EveryToken(), upload)  # type: ignore[arg-type]
    monkeypatch.setattr(rig.runner.execution, "constrained", constraints)
    core = rig.core({})
    for row in range(1, 9):
        core.add(row, [row] * 20, position=19, temperature=0.7)
    make = core.plan

    def plan(**running: Any) -> pb.StepPlan:
        message = make(**running)
        if message.started.rows:
            message.started.constraints = b"".join(bytes([row % 2]) * 32 for row in range(1, 9))
        return message

    monkeypatch.setattr(core, "plan", plan)
    for _ in range(4):
        trace = rig.step(core, decode=list(core.rows))
        assert trace.crossings == [TO_DEVICE, TO_DEVICE, TO_HOST]
        assert difference(trace.static_part, drawing_step.static_part) == ""
