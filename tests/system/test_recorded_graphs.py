"""Captured steps compute what Transformers computes: the recorder of graphs serves the bundled model on a CPU.

Attention is plain operators in the default suite and FlexAttention's kernels, which take a minute to compile, in the
long one.
"""

from collections.abc import Sequence

import pytest

from tests.system.real_service import (
    MAX_ROWS,
    NEAR_TIE,
    NEW_TOKENS,
    NUM_PROMPTS,
    SMALL_PAGES,
    TIMEOUT_SECONDS,
    Output,
    bundled_cases,
    real_service,
)

# Its workers are forked by a process that has imported the compiler, which takes seconds.
pytestmark = pytest.mark.together("compiler")

PROGRAM = "tests.rigs.recorded_worker"
CAPTURED = r"(\d+) of \1 step shapes captured as graphs"


def preempted(outputs: Sequence[Output]) -> list[Output]:
    return [output for output in outputs if output.summary and output.summary.timing.preemptions]


def test_replayed_steps_of_a_small_pool_equal_the_reference() -> None:
    cases = bundled_cases()[::3]
    with real_service(PROGRAM, SMALL_PAGES, flags=["--plain-attention"]) as service:
        outputs = service.read(cases).result()
        service.roomy.wait_line(CAPTURED)
    assert [output.tokens for output in outputs] == [case.tokens for case in cases]
    assert preempted(outputs)


@pytest.mark.long
def test_replayed_steps_equal_the_reference_across_preemptions_and_a_kill() -> None:
    cases = bundled_cases()
    with real_service(PROGRAM) as service:
        service.start_small().wait_line("joined", TIMEOUT_SECONDS)
        reading = service.read(cases)
        reading.wait_tokens(MAX_ROWS * NEW_TOKENS)
        service.small_serves_alone()
        outputs = reading.result()
        service.start_small().wait_line(CAPTURED)
    assert [output.tokens for output in outputs] == [case.tokens for case in cases]
    assert len(cases) == NUM_PROMPTS == 32
    assert preempted(outputs)
    interrupted = [output for output in outputs if output.summary and output.summary.timing.worker_changes]
    assert len(interrupted) >= MAX_ROWS // 4


@pytest.mark.long
def test_replayed_steps_of_two_ranks_equal_the_reference() -> None:
    """Both ranks replay the collective calls of a step."""
    cases = bundled_cases()[::5]
    with real_service("tests.rigs.recorded_ranks") as service:
        outputs = service.read(cases).result()
        service.roomy.wait_line(CAPTURED)
    for case, output in zip(cases, outputs, strict=True):
        assert output.tokens == case.tokens or case.margin < NEAR_TIE
