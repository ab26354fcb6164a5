"""What read_steps accepts and refuses."""

from pathlib import Path

import pytest

from tandem_client.plot.data import StepsFileError, read_steps
from tests.client.plot.step_logs import HEADER, LINES, written


def test_columns_hold_the_values_of_the_lines(tmp_path: Path) -> None:
    log = read_steps(written(tmp_path / "steps.csv"))
    assert log.is_step.tolist() == [False, True, True, True, False, False, True, True, True]
    assert log.kind.tolist()[:3] == ["joined", "prefill", "mixed"]
    assert log.cause[log.kind == "reset"].tolist() == ["worker lost"]
    assert log.all_pages_used.tolist() == [0, 4, 6, 10, 0, 0, 7, 7, 1]
    assert log.seconds.tolist() == pytest.approx([0, 0.1, 0.2, 0.25, 0.3, 2.3, 2.4, 2.44, 3.5])


def test_time_starts_with_the_first_step(tmp_path: Path) -> None:
    log = read_steps(written(tmp_path / "steps.csv", LINES[1:3]))
    assert log.seconds.tolist() == pytest.approx([0.08, 0.18])


@pytest.mark.parametrize("cut", ["", "7,4.6", "7,4.600000,decode,,1,0,1,0,1,1,1,0,20,1,2,3,10.000,4"])
def test_a_file_that_is_still_written_is_read_up_to_its_last_whole_line(tmp_path: Path, cut: str) -> None:
    log = read_steps(written(tmp_path / "steps.csv", [*LINES, cut], end=""))
    assert log.step.tolist()[-1] == 6


def test_columns_of_a_later_service_are_ignored(tmp_path: Path) -> None:
    file = written(tmp_path / "steps.csv", [f"new,{line}" for line in LINES], header=f"later,{HEADER}")
    assert read_steps(file).ms.tolist() == read_steps(written(tmp_path / "old.csv")).ms.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no column kind: it is not a step log"),
        ("a,b,c\n1,2,3\n", "has no column kind: it is not a step log"),
        ("\x89PNG\r\n\x1a\n\0\0", "has no column kind: it is not a step log"),
        ("x" * 100_000, "has no column kind: it is not a step log"),
        (
            HEADER.removesuffix(",workers,all_running,all_pages_used,all_pages_cached,all_pages_total") + "\n",
            "has no column workers: it is not a step log, or an older service wrote it",
        ),
        (HEADER + "\n", "has no step yet"),
        (f"{HEADER}\n{LINES[0]}\n", "has no step yet"),
        (f"{HEADER}\n{LINES[1]}\n1,2,3\n", "with 3 columns"),
        (f"{HEADER}\n{LINES[1].replace('80.000', 'x')}\n", "could not convert string 'x' to float64 at row 0"),
    ],
    ids=["empty", "other columns", "binary", "one long line", "older service", "no line", "no step", "short", "text"],
)
def test_a_file_that_is_not_a_step_log_is_refused_in_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "steps.csv"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(StepsFileError) as refusal:
        read_steps(file)
    assert str(refusal.value).startswith(str(file))
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 400
