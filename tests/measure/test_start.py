"""The arithmetic of the start benchmark on known times, and the reading of a worker's log."""

import pytest

from tests.measure.start import summary
from tests.measure.start_run import Start, phase_of


def test_a_phase_that_a_start_lacks_counts_as_nothing() -> None:
    starts = [
        Start(first_token=4.0, phases={"imports": 2.0, "prefill kernel": 3.0}),
        Start(first_token=6.0, phases={"imports": 1.0}),
        Start(first_token=5.0, phases={"imports": 4.0}, after_kill=3.5),
    ]
    found = summary(starts)
    assert found["first_token"] == {"median": 5.0, "least": 4.0, "most": 6.0}
    assert found["worker_phases"]["imports"] == {"median": 2.0, "least": 1.0, "most": 4.0}
    assert found["worker_phases"]["prefill kernel"] == {"median": 0.0, "least": 0.0, "most": 3.0}
    assert found["after_kill"]["median"] == 3.5


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        ("imports                                 3.98 s", ("imports", 3.98)),
        ("weights, float32 on cpu                 0.13 s", ("weights, float32 on cpu", 0.13)),
        ("a prompt takes 117 us per token", None),
        ("joined the scheduler; generation 1", None),
    ],
)
def test_a_phase_is_read_from_its_log_line(message: str, phase: tuple[str, float] | None) -> None:
    assert phase_of(message) == phase
