"""The steps file: its lines, when they are written, and that a write error does not stop the service."""

import io
import logging
from pathlib import Path

import pytest

from scheduler_svc.core.messages.reports import ResetCause, StepKind, StepReport
from scheduler_svc.recording.steps_file import HEADER, StepsFile
from tandem_contract import private_file
from tests.scheduler_svc.metrics.test_front_meter import Clock


def report(step: int = 7, **changes: object) -> StepReport:
    values = {
        "kind": StepKind.MIXED, "cause": None, "at": 102.5, "step": step, "lane": 2, "generation": 3, "running": 4,
        "waiting": 5, "prefill_tokens": 60, "decode_tokens": 2, "output_tokens": 3, "pages_used": 11,
        "pages_cached": 22, "pages_total": 99, "preemptions": 1, "compute_us": 4567, "span_seconds": 0.0089126,
        "workers": 2, "all_running": 6, "all_pages_used": 33, "all_pages_cached": 44, "all_pages_total": 198,
    }  # fmt: skip
    return StepReport(**{**values, **changes})  # type: ignore[arg-type]


def test_a_line_has_the_report_s_values_in_its_columns(tmp_path: Path) -> None:
    file = StepsFile(tmp_path / "steps.csv", Clock())
    file.add(report())
    file.add(report(kind=StepKind.RESET, cause=ResetCause.WORKER_LOST))
    file.close()
    header, step, reset = (tmp_path / "steps.csv").read_text().splitlines()
    assert dict(zip(header.split(","), step.split(","), strict=True)) == {
        "step": "7", "at_seconds": "2.500000", "kind": "mixed", "cause": "", "running": "4", "waiting": "5",
        "tokens": "62", "prefill_tokens": "60", "decode_tokens": "2", "output_tokens": "3", "pages_used": "11",
        "pages_cached": "22", "pages_total": "99", "preemptions": "1", "lane": "2", "generation": "3", "ms": "4.567",
        "span_ms": "8.913", "workers": "2", "all_running": "6", "all_pages_used": "33", "all_pages_cached": "44",
        "all_pages_total": "198",
    }  # fmt: skip
    assert header + "\n" == HEADER
    assert reset.split(",")[2:4] == ["reset", "worker lost"]


def test_lines_are_written_once_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps.csv", Clock()
    file = StepsFile(path, clock)
    assert path.read_text() == HEADER
    file.add(report(1))
    clock.now += 0.9
    file.turned(0.0)
    assert len(path.read_text().splitlines()) == 1
    clock.now += 0.1
    file.turned(0.0)
    file.add(report(2))
    file.turned(0.0)
    assert [line.split(",")[0] for line in path.read_text().splitlines()[1:]] == ["1"]
    file.close()
    assert [line.split(",")[0] for line in path.read_text().splitlines()[1:]] == ["1", "2"]


def test_lines_of_fast_steps_are_written_before_a_second_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    file = StepsFile(path, Clock())
    for step in range(5000):
        file.add(report(step))
    written = path.read_text()
    assert written.endswith("\n")
    assert len(written.splitlines()) > 4000
    file.close()


def test_only_its_owner_may_read_the_file_and_none_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    StepsFile(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("another file")
    with pytest.raises(FileExistsError):
        StepsFile(path)
    assert path.read_text() == "another file"


def test_a_full_disk_ends_the_writing_and_not_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = io.FileIO("/dev/full", "wb")
    monkeypatch.setattr(private_file, "create", lambda *_, **__: full)
    clock = Clock()
    file = StepsFile(tmp_path / "steps.csv", clock)
    for step in range(3000):
        file.add(report(step))
        clock.now += 2
        file.turned(0.0)
    file.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "steps.csv cannot be written: No space left on device; lines are lost" in caplog.messages[0]


def test_a_removed_file_ends_the_writing_and_not_the_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "steps.csv", Clock()
    file = StepsFile(path, clock)
    path.unlink()
    for step in range(3):
        file.add(report(step))
        clock.now += 2
        file.turned(0.0)
    file.close()
    [message] = caplog.messages
    assert str(path) in message
    assert message.endswith("no more steps are written: it was removed")
    assert not path.exists()
