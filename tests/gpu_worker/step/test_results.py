"""Results reach the host through buffers that are allocated once, each reused after its outcome is collected."""

from collections.abc import Callable

import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.cuda.staging import ResultRing
from gpu_worker.sampling.inputs import TokenLogprobs as LogprobTensors
from gpu_worker.step.in_flight import DeviceLost
from gpu_worker.step.output import StepOutput
from tests.gpu_worker.rig import Rig
from tests.gpu_worker.rig_specs import SPECS
from tests.gpu_worker.step.fake_gpu import Allocations, as_on_gpu
from tests.gpu_worker.step.test_runner import running

NUM_BUFFERS = 3


def output_of(seed: int, num_tokens: int, *, num_logprobs: int = 0, top_k: int = 3) -> StepOutput:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 99, (num_tokens,), generator=draw)
    if not num_logprobs:
        return StepOutput(tokens=tokens)
    logprobs = LogprobTensors(
        logprobs=torch.randn(num_logprobs, 2, generator=draw)[:, 0],
        top_token_ids=torch.randint(0, 99, (num_logprobs, top_k), generator=draw, dtype=torch.int32),
        top_logprobs=torch.randn(num_logprobs, top_k, generator=draw),
    )
    return StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=logprobs if seed % 2 else None)


def same(found: StepOutput, wanted: StepOutput) -> bool:
    pairs = [(found.tokens, wanted.tokens)]
    for mine, other in ((found.logprobs, wanted.logprobs), (found.prompt_logprobs, wanted.prompt_logprobs)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            pairs += [(getattr(mine, name), getattr(other, name)) for name in LogprobTensors.__slots__]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def allocations() -> Allocations:
    return Allocations()


def ring_of(allocations: Allocations, num_tokens: int = 5) -> ResultRing:
    return ResultRing(num_buffers=NUM_BUFFERS, num_tokens=num_tokens, allocate=allocations)


def test_steps_in_flight_have_memory_of_their_own_and_allocate_none(allocations: Allocations) -> None:
    ring = ring_of(allocations)
    waiting: list[tuple[StepOutput, StepOutput]] = []
    for seed in range(50):
        output = output_of(seed, num_tokens=seed % 6)
        waiting.append((ring.to_host(output), output))
        # The device's results may be overwritten by the next step, as those of a captured graph are.
        waiting[-1] = waiting[-1][0], output_of(seed, num_tokens=seed % 6)
        output.tokens.fill_(-9)
        assert all(same(host, wanted) for host, wanted in waiting)
        if len(waiting) == NUM_BUFFERS:
            ring.put_back(waiting.pop(0)[0])
    assert allocations.sizes == [8, 8, 8]


def test_larger_results_enlarge_every_buffer_once(allocations: Allocations) -> None:
    ring = ring_of(allocations)
    small = ring.to_host(output_of(0, num_tokens=5))
    for seed in (1, 2, 3, 4):
        output = output_of(seed, num_tokens=3, num_logprobs=5)
        host = ring.to_host(output)
        assert same(host, output)
        ring.put_back(host)
    # A buffer of the former size does not come back into use.
    ring.put_back(small)
    hosts = [ring.to_host(output_of(seed, num_tokens=5, num_logprobs=5)) for seed in range(NUM_BUFFERS)]
    assert all(same(host, output_of(seed, num_tokens=5, num_logprobs=5)) for seed, host in enumerate(hosts))
    # 3 tokens, twice 5 logprobs of 4 bytes, and twice 15 numbers of 4 bytes each: 3 + 2 * (3 + 8 + 8) words.
    assert allocations.sizes == [8, 8, 8, 64, 64, 64]


def test_more_steps_in_flight_than_buffers_overwrite_nothing(allocations: Allocations) -> None:
    ring = ring_of(allocations)
    hosts = [ring.to_host(output_of(seed, num_tokens=4)) for seed in range(5)]
    assert all(same(host, output_of(seed, num_tokens=4)) for seed, host in enumerate(hosts))


@pytest.fixture
def rig(rig_of: Callable[..., Rig], device: torch.device) -> Rig:
    if device.type != "cpu":
        pytest.skip("the events of a real device cannot be replaced")
    return rig_of(SPECS[0])


def tokens_of(rig: Rig, *, num_steps: int = 6) -> list[list[object]]:
    """Results of a chunk and decode steps with two plans in flight, read after all steps."""
    core = rig.core()
    core.add(1, rig.prompt(20, seed=1), num_logprobs=3)
    core.add(2, rig.prompt(31, seed=2), temperature=1.0, seed=5)
    rig.runner.submit(core.plan(chunks={1: 20, 2: 31}))
    outcomes = []
    for _ in range(num_steps):
        rig.runner.submit(core.plan(decode=[2, 1]))
        outcomes.append(rig.runner.collect())
    outcomes.append(rig.runner.collect())
    assert all(outcome.status == pb.STEP_STATUS_OK for outcome in outcomes)
    return [
        [outcome.tokens.tolist(), *(getattr(outcome.logprobs, name).tolist() for name in LogprobTensors.__slots__)]
        for outcome in outcomes
    ]


def test_outcomes_keep_their_values_while_buffers_are_reused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tokens_of(rig)
    allocations = as_on_gpu(rig.runner, monkeypatch)
    assert tokens_of(rig) == wanted
    before = len(allocations.sizes)
    assert tokens_of(rig) == wanted
    assert len(allocations.sizes) == before


@pytest.mark.parametrize("wait", [False, True])
def test_a_device_that_fails_during_a_step_fails_it_and_skips_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """CUDA reports the error when the outcome is collected, and a second plan is in flight then."""
    has_failed: list[bool] = []
    as_on_gpu(rig.runner, monkeypatch, fails=lambda: bool(has_failed))
    core = running(rig)
    for _ in range(2):
        rig.runner.submit(core.plan(decode=[1]))
    has_failed.append(True)
    failed = rig.runner.collect(wait=wait)
    # The scheduler may have sent another plan before it learned of the failure.
    rig.runner.submit(core.plan(decode=[1]))
    skipped = [rig.runner.collect(wait=wait) for _ in range(2)]
    assert (failed.step, failed.status) == (2, pb.STEP_STATUS_FAILED)
    assert failed.detail == "CUDA error: an illegal memory access was encountered"
    assert [(one.step, one.status, one.detail) for one in skipped] == [
        (3, pb.STEP_STATUS_SKIPPED, ""),
        (4, pb.STEP_STATUS_SKIPPED, ""),
    ]
    assert not any(one.tokens.size for one in (failed, *skipped))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        rig.runner.collect()


def test_a_plan_of_a_new_generation_in_flight_fails_with_the_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed: list[bool] = []
    as_on_gpu(rig.runner, monkeypatch, fails=lambda: bool(has_failed))
    old = running(rig)
    rig.runner.submit(old.plan(decode=[1]))
    new = rig.core()
    new.add(1, rig.prompt(20, seed=1))
    rig.runner.submit(new.plan(chunks={1: 20}))
    rig.runner.submit(new.plan(decode=[1]))
    has_failed.append(True)
    outcomes = [rig.runner.collect() for _ in range(3)]
    assert [outcome.generation for outcome in outcomes] == [old.generation, new.generation, new.generation]
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == [pb.STEP_STATUS_FAILED, pb.STEP_STATUS_FAILED, pb.STEP_STATUS_SKIPPED]
    assert [outcome.step for outcome in outcomes] == [2, 1, 2]
