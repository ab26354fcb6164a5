"""The runner as the core uses it: outcomes in order, failures that spare the process, independent rows."""

import weakref

import numpy as np
import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.step.in_flight import DeviceLost
from tests.gpu_worker.plans import TinyCore, int32
from tests.gpu_worker.reference import hidden_and_logits
from tests.gpu_worker.rig import Rig


def greedy(rig: Rig, tokens: list[int], num_new: int) -> list[int]:
    """The next token by eager attention."""
    out = list(tokens)
    for _ in range(num_new):
        out.append(int(hidden_and_logits(rig.eager, out)[1][-1].argmax()))
    return out[len(tokens) :]


def test_two_plans_in_flight_feed_tokens_on_the_device(rig: Rig) -> None:
    """A plan that decodes a token is submitted before the result that brings it; outcomes keep the plans' order."""
    core = rig.core()
    prompts = {1: rig.prompt(20, seed=1), 2: rig.prompt(31, seed=2)}
    for row, prompt in prompts.items():
        core.add(row, prompt)
    rig.runner.submit(core.plan(chunks={1: 20, 2: 31}))
    got: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(6):
        rig.runner.submit(core.plan(decode=[2, 1]))
        assert rig.runner.num_in_flight == 2
        outcome = rig.runner.collect()
        assert outcome is not None and outcome.status == pb.STEP_STATUS_OK
        assert outcome.tokens.dtype == np.int32 and outcome.compute_us > 0
        order = (1, 2) if outcome.step == 1 else (2, 1)
        for row, token in zip(order, outcome.tokens.tolist(), strict=True):
            got[row].append(token)
    last = rig.runner.collect()
    assert last is not None and last.step == 7
    assert rig.runner.collect() is None
    for row, prompt in prompts.items():
        assert got[row] == greedy(rig, prompt, 6)


def test_pages_and_rows_are_reused_while_their_last_step_is_in_flight(rig: Rig) -> None:
    """The next plan, submitted before the first result, gives row and pages of a sequence to another."""
    core = rig.core()
    first, second = rig.prompt(33, seed=3), rig.prompt(40, seed=4)
    sequence = core.add(2, first)
    rig.runner.submit(core.plan(chunks={2: 33}))
    core.free(sequence)
    core.free_pages = [*sequence.pages, *core.free_pages]
    core.add(2, second)
    rig.runner.submit(core.plan(chunks={2: 40}))
    for prompt in (first, second):
        outcome = rig.runner.collect()
        assert outcome is not None
        assert outcome.tokens.tolist() == greedy(rig, prompt, 1)


def test_drawn_tokens_do_not_depend_on_row_or_batch(rig: Rig) -> None:
    prompt = rig.prompt(17, seed=6)
    how = {"temperature": 1.2, "top_k": 40, "seed": 99, "sample_idx": 1}
    drawn = []
    for row, company in ((1, []), (3, [1, 2])):
        core = rig.core()
        for other in company:
            core.add(other, rig.prompt(25, seed=other), temperature=0.7, top_p=0.9, seed=other)
        core.add(row, prompt, **how)
        rig.step(core, chunks={**dict.fromkeys(company, 25), row: 17})
        for _ in range(5):
            rig.step(core, decode=[*company, row])
        drawn.append(core.rows[row].tokens[17:])
    assert drawn[0] == drawn[1]
    assert drawn[0] != greedy(rig, prompt, 6)


def test_banned_tokens_appear_only_from_their_position_on(rig: Rig) -> None:
    prompt = rig.prompt(12, seed=7)
    free = greedy(rig, prompt, 1)[0]
    core = rig.core()
    core.add(1, prompt, banned=[free], banned_until=13)
    core.add(2, prompt, banned=[free], banned_until=12)
    outcome = rig.step(core, chunks={1: 12, 2: 12})
    assert outcome.tokens[0] != free
    assert outcome.tokens[1] == free


def test_a_nonfinite_row_is_reported_and_affects_no_other(rig: Rig) -> None:
    """Neither a neighbour in the batch nor the next owner of the pages is affected."""
    core = rig.core()
    prompt = rig.prompt(20, seed=8)
    core.add(1, rig.prompt(18, seed=9))
    core.add(2, prompt)
    rig.step(core, chunks={1: 18, 2: 20})
    rig.spoil(core.rows[1].pages[0])
    outcome = rig.submit(core.plan(decode=[2, 1]))
    assert outcome.status == pb.STEP_STATUS_OK
    assert outcome.nonfinite.tolist() == [1]
    core.learn(outcome.tokens)
    assert core.rows[2].tokens[20:] == greedy(rig, prompt, 2)
    ended = core.rows[1]
    core.free_pages = [*ended.pages, *core.free_pages]
    core.add(1, prompt[:19])
    plan = core.plan(chunks={1: 19})
    plan.zero_pages = int32(ended.pages)
    again = rig.submit(plan)
    assert again.tokens.tolist() == greedy(rig, prompt[:19], 1)


def expect_failure(rig: Rig, core: TinyCore, message: pb.StepPlan, status: "pb.StepStatus", detail: str) -> None:
    outcome = rig.submit(message)
    assert (outcome.status, outcome.step) == (status, message.step)
    assert detail in outcome.detail
    skipped = rig.submit(core.plan(decode=[1]))
    assert (skipped.status, skipped.tokens.size) == (pb.STEP_STATUS_SKIPPED, 0)
    fresh = rig.core()
    fresh.add(1, rig.prompt(9, seed=10))
    assert rig.step(fresh, chunks={1: 9}).tokens.tolist() == greedy(rig, rig.prompt(9, seed=10), 1)


def running(rig: Rig) -> TinyCore:
    core = rig.core()
    core.add(1, rig.prompt(20, seed=11))
    rig.step(core, chunks={1: 20})
    return core


def test_a_wrong_checksum_is_out_of_sync(rig: Rig) -> None:
    core = running(rig)
    message = core.plan(decode=[1])
    message.checksum ^= 1
    expect_failure(rig, core, message, pb.STEP_STATUS_OUT_OF_SYNC, "row tables differ: checksum 0x")


def test_a_gap_in_steps_is_out_of_sync(rig: Rig) -> None:
    core = running(rig)
    core.plan(decode=[1])
    message = core.plan(decode=[1])
    expect_failure(rig, core, message, pb.STEP_STATUS_OUT_OF_SYNC, "step 3 follows step 1")


def test_an_invalid_plan_fails_and_spares_the_process(rig: Rig) -> None:
    core = running(rig)
    message = core.plan(decode=[1])
    message.decode_rows = int32([rig.geometry.max_rows + 1])
    expect_failure(rig, core, message, pb.STEP_STATUS_FAILED, f"it must be 1 to {rig.geometry.max_rows}")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("tried to allocate 20 GiB"), pb.STEP_STATUS_OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), pb.STEP_STATUS_OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory"), pb.STEP_STATUS_OUT_OF_MEMORY),
        (MemoryError(), pb.STEP_STATUS_OUT_OF_MEMORY),
        (RuntimeError("a kernel failed"), pb.STEP_STATUS_FAILED),
    ],
)
def test_a_failing_step_is_answered_and_spares_the_process(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, status: "pb.StepStatus"
) -> None:
    core = running(rig)

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner.steps, "run", fail)
        outcome = rig.submit(core.plan(decode=[1]))
    assert (outcome.status, outcome.step) == (status, 2)
    expect_failure(rig, core, core.plan(decode=[1]), pb.STEP_STATUS_SKIPPED, "")


def test_a_step_out_of_memory_holds_no_tensor_when_it_is_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither through the traceback nor through a cycle of the exception with a frame, nor in the log's queue."""
    core, held = running(rig), []

    def fail(*args: object, **kwargs: object) -> None:
        activations = torch.zeros(1 << 20)
        held.append(weakref.ref(activations))
        try:
            torch.empty(1 << 60, dtype=torch.uint8)
        except RuntimeError as error:
            kept = error  # a cycle: the frame refers to the exception, and its traceback refers to the frame
            raise kept from None

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner.steps, "run", fail)
        rig.runner.submit(core.plan(chunks={}, decode=[1]))
    assert [reference() for reference in held] == [None]
    assert rig.runner.on_device.last_logits is None
    outcome = rig.runner.collect()
    assert outcome is not None
    assert outcome.status == pb.STEP_STATUS_OUT_OF_MEMORY and "DefaultCPUAllocator" in outcome.detail
    # The next generation runs as if nothing had happened.
    fresh = rig.core()
    fresh.add(1, rig.prompt(9, seed=10))
    assert rig.step(fresh, chunks={1: 9}).tokens.tolist() == greedy(rig, rig.prompt(9, seed=10), 1)


def test_a_lost_device_answers_its_plan_and_then_ends_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    core = running(rig)

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(rig.runner.steps, "run", fail)
    monkeypatch.setattr(rig.runner.execution, "lost", "")
    outcome = rig.submit(core.plan(decode=[1]))
    assert outcome.status == pb.STEP_STATUS_FAILED
    with pytest.raises(DeviceLost, match="illegal memory access"):
        rig.runner.collect()


def test_plans_of_an_older_generation_are_skipped(rig: Rig) -> None:
    old, new = running(rig), running(rig)
    outcome = rig.submit(old.plan(decode=[1]))
    assert (outcome.generation, outcome.status) == (old.generation, pb.STEP_STATUS_SKIPPED)
    rig.step(new, decode=[1])


def test_a_sequence_reaches_max_length(rig: Rig) -> None:
    core = rig.core()
    length = rig.geometry.max_length
    core.add(1, rig.prompt(length - 2, seed=12))
    rig.step(core, chunks={1: length - 2})
    for _ in range(2):
        rig.step(core, decode=[1])
    outcome = rig.submit(core.plan(decode=[1]))
    assert outcome.status == pb.STEP_STATUS_FAILED
    assert "the limit is" in outcome.detail


def test_every_row_runs_at_once(rig: Rig) -> None:
    core = rig.core()
    rows = range(1, rig.geometry.max_rows + 1)
    for row in rows:
        core.add(row, rig.prompt(10 + row, seed=row))
        rig.step(core, chunks={row: 10 + row})
    for _ in range(2):
        rig.step(core, decode=reversed(rows))
    for row in rows:
        assert core.rows[row].tokens[10 + row :] == greedy(rig, rig.prompt(10 + row, seed=row), 3)


def test_a_plan_zeroes_pages(rig: Rig) -> None:
    """FlexAttention reads the tail of a page, too: it is masked, but 0 times NaN is NaN. C++ kernels do not read it."""
    prompt = rig.prompt(20, seed=8)
    for ordered in (False, True):
        core = rig.core()
        sequence = core.add(1, prompt)
        rig.spoil(sequence.pages[-1])
        plan = core.plan(chunks={1: 20})
        plan.zero_pages = int32(sequence.pages[-1:]) if ordered else b""
        outcome = rig.submit(plan)
        for part in rig.content(sequence.pages[-1]):
            tail = part[:, 20 % rig.geometry.page_size :]
            assert bool((tail == 0).all() if ordered else tail.isnan().all())
    assert not len(outcome.nonfinite)
    assert outcome.tokens.tolist() == greedy(rig, prompt, 1)


def test_joining_zeroes_the_pool(rig: Rig) -> None:
    """A new scheduler knows nothing of the pages of earlier generations."""
    core = running(rig)
    rig.spoil(3)
    rig.runner.join(pb.Joined(generation=core.generation + 1))
    assert not any(pool.any() for pool in rig.pools)


def test_later_imports_do_not_recompile_kernels(rig: Rig) -> None:
    """Any import may register a class with pytree, and FlexAttention's traces depend on their number."""

    class Imported: ...

    torch.utils._pytree.register_pytree_node(Imported, lambda _: ([], None), lambda *_: Imported())
    rig.step(running(rig), decode=[1])
