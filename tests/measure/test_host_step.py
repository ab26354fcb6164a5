"""The host-step benchmark runs, and its lines hold the promised figures; times are not tested."""

import pytest

from tests.measure import host_step
from tests.measure.host_step_load import Load

PHASES = {
    "parse_frame", "read_plan", "tables.apply", "tables.check", "lay_out", "tables.advance", "staging", "result_frame",
}  # fmt: skip


@pytest.mark.parametrize(("draws", "mixed"), [(False, False), (True, False), (False, True)])
def test_a_load_has_a_time_for_each_phase(draws: bool, mixed: bool) -> None:
    line = host_step.measure(8, Load(draws=draws, mixed=mixed), 3)
    assert line["rows"] == 8
    assert line["phases_us"].keys() == PHASES
    assert 0 < max(line["phases_us"].values()) < 10 * line["step_us"]


def test_too_many_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_step.main(["--steps=2000"])
    assert "it must be 1 to" in capsys.readouterr().err
