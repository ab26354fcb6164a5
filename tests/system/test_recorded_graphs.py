"""Captured steps compute what Transformers computes: the recorder of graphs serves the bundled model on a CPU."""

from collections.abc import Sequence

import pytest

from tests.rigs.processes import Rig
from tests.system.real_service import (
    BUNDLED,
    MAX_ROWS,
    NEAR_TIE,
    NEW_TOKENS,
    NUM_PROMPTS,
    SMALL_PAGES,
    TIMEOUT_SECONDS,
    Output,
    RealService,
    cases_of,
    prompts,
    reference,
)

PROGRAM = "tests.rigs.recorded_worker"
CAPTURED = r"(\d+) of \1 step shapes captured as graphs"


def preempted(outputs: Sequence[Output]) -> list[Output]:
    return [output for output in outputs if output.summary and output.summary.timing.preemptions]


def test_replayed_steps_of_a_small_pool_equal_the_reference() -> None:
    texts = prompts()[::5]
    with reference(BUNDLED / "model", texts, NEW_TOKENS) as process, Rig() as rig:
        service = RealService(rig, PROGRAM, SMALL_PAGES)
        cases = cases_of(process, texts)
        outputs = service.read(cases).result()
        service.client.close()
        service.roomy.wait_line(CAPTURED)
    assert [output.tokens for output in outputs] == [case.tokens for case in cases]
    assert preempted(outputs)


@pytest.mark.long
def test_replayed_steps_equal_the_reference_across_preemptions_and_a_kill() -> None:
    texts = prompts()
    with reference(BUNDLED / "model", texts, NEW_TOKENS) as process, Rig() as rig:
        service = RealService(rig, PROGRAM)
        cases = cases_of(process, texts)
        service.start_small().wait_line("joined", TIMEOUT_SECONDS)
        reading = service.read(cases)
        reading.wait_tokens(MAX_ROWS * NEW_TOKENS)
        service.small_serves_alone()
        outputs = reading.result()
        service.client.close()
        service.start_small().wait_line(CAPTURED)
    assert [output.tokens for output in outputs] == [case.tokens for case in cases]
    assert len(cases) == NUM_PROMPTS == NEW_TOKENS == 64
    assert preempted(outputs)
    interrupted = [output for output in outputs if output.summary and output.summary.timing.worker_changes]
    assert len(interrupted) >= MAX_ROWS // 4


@pytest.mark.long
def test_replayed_steps_of_two_ranks_equal_the_reference() -> None:
    """Both ranks replay the collective calls of a step."""
    texts = prompts()[::5]
    with reference(BUNDLED / "model", texts, NEW_TOKENS) as process, Rig() as rig:
        service = RealService(rig, "tests.rigs.recorded_ranks")
        cases = cases_of(process, texts)
        outputs = service.read(cases).result()
        service.client.close()
        service.roomy.wait_line(CAPTURED)
    for case, output in zip(cases, outputs, strict=True):
        assert output.tokens == case.tokens or case.margin < NEAR_TIE
