"""When the flight recorder writes a file, its permissions, how many there are, and that it harms nothing."""

import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc.core.messages import events as ev
from scheduler_svc.recording import flight_files
from scheduler_svc.recording.flight import FlightFileError, FlightRecorder, lines
from tests.rigs.processes import child_environment, no_threads, run
from tests.scheduler_svc.core.world import World
from tests.scheduler_svc.recording.flight.test_ring import submit

LOST = ev.WorkerLost(worker="w-7", reason="killed")


@pytest.fixture(autouse=True)
def _keep_faulthandler(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process keeps pytest's."""
    for name in ("enable", "disable"):
        monkeypatch.setattr(flight_files.faulthandler, name, lambda *_: None)


def files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.exists() else []


def written(recorder: FlightRecorder, now: float) -> None:
    """Checks at `now`, and waits for the thread that writes."""
    recorder.checked(now)
    if recorder._writing is not None:
        recorder._writing.join()


def test_a_death_is_written_a_second_later_with_what_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "flight"
    recorder = FlightRecorder(path)
    recorder.handled(99.0, submit(World()), [])
    recorder.handled(100.0, LOST, [])
    written(recorder, 100.9)
    assert files(path) == []
    recorder.handled(100.95, ev.Cancel(frontend="f", stream=1), [])
    written(recorder, 101.0)
    [file] = files(path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(path.stat().st_mode) == 0o700
    assert f"worker w-7 was lost: the last 3 events are in {file}" in caplog.text
    head, *rest = lines(file)
    assert head.endswith(f"process {os.getpid()}: worker w-7 was lost")
    told = [["-2.000000", "submit"], ["-1.000000", "worker_lost"], ["-0.050000", "cancel"]]
    assert [line.split()[:2] for line in rest] == told
    # A stream is shown with the id of its request.
    assert rest[2].endswith("frontend f, stream 1, detach False") and "request_id r1" in rest[0]
    written(recorder, 200.0)
    assert files(path) == [file]


def test_many_deaths_make_few_files(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    for idx in range(1000):
        recorder.handled(idx / 10, LOST, [])
        written(recorder, idx / 10)
    assert 9 <= len(files(tmp_path)) <= 11
    recorder.close()
    [head, *_] = lines(files(tmp_path)[-1])
    assert head.count("worker w-7 was lost") == 16


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    for idx in range(flight_files.MAX_FILES + 5):
        recorder = FlightRecorder(tmp_path)
        recorder._number = 1000 + idx
        recorder.handled(0.0, LOST, [])
        recorder.close()
    names = [file.name for file in files(tmp_path)]
    assert names.pop() == "mine.txt"
    numbers = [int(name.removesuffix(".jsonl").split("-")[-1]) for name in names]
    assert sorted(numbers) == list(range(1006, 1006 + flight_files.MAX_FILES))


def test_a_new_file_stays_after_the_clock_was_set_back(tmp_path: Path) -> None:
    for idx in range(flight_files.MAX_FILES):
        old = tmp_path / f"flight-20990101T000000-1-{idx}.jsonl"
        old.touch()
        os.utime(old, (4e9 + idx, 4e9 + idx))
    recorder = FlightRecorder(tmp_path)
    recorder.handled(0.0, LOST, [])
    recorder.close()
    names = [file.name for file in files(tmp_path)]
    assert len(names) == flight_files.MAX_FILES and f"-{os.getpid()}-" in "".join(names)
    assert "-1-0.jsonl" not in "".join(names)


def test_an_orderly_end_writes_nothing(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight")
    recorder.handled(0.0, ev.WorkerLost(worker="w", reason="it stops", is_orderly=True), [])
    recorder.handled(1.0, ev.DrainStarted(), [])
    recorder.handled(2.0, ev.FrontendLost(frontend="f"), [])
    written(recorder, 100.0)
    recorder.close()
    assert files(tmp_path / "flight") == []


def test_an_exception_of_the_core_is_written_without_its_text(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)

    def fail() -> None:
        with recorder.guarding(KeyError):
            raise ValueError("zebra")

    def fail_as_expected() -> None:
        with recorder.guarding(KeyError):
            raise KeyError

    recorder.handled(0.0, ev.FrontendJoined(frontend="f"), [])
    with pytest.raises(KeyError):
        fail_as_expected()
    assert [file.suffix for file in files(tmp_path)] == [".open"]
    with pytest.raises(ValueError, match="zebra"):
        fail()
    [file] = [file for file in files(tmp_path) if file.suffix == ".jsonl"]
    assert "the core raised ValueError in test_recorder.py:" in next(lines(file))
    assert "zebra" not in file.read_text()
    recorder.close()
    assert len([file for file in files(tmp_path) if file.suffix == ".jsonl"]) == 1


def test_a_folder_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    recorder = FlightRecorder(tmp_path / "file" / "flight")
    with recorder.guarding():
        recorder.handled(0.0, LOST, [])
        written(recorder, 10.0)
    assert "worker w-7 was lost; the last events are not kept" in caplog.messages
    assert f"{tmp_path}/file/flight cannot be written: File exists; the service continues without" in caplog.text
    assert "the stacks at a fatal signal cannot be written" in caplog.text


def test_a_recorder_that_fails_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path)
    monkeypatch.setattr(recorder._ring, "add", lambda *_: 1 / 0)
    for _ in range(3):
        recorder.handled(0.0, LOST, [])
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_fatal_signal_leaves_the_stacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One process forks those that get the signals; each has a folder of its own."""
    numbers = [int(number) for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)] + [0]
    code = f"""
import os, pathlib
from scheduler_svc.recording import flight_files
def fatal(number):
    if number:
        os.kill(os.getpid(), number)
for number in {numbers}:
    if not os.fork():
        flight_files.catch_fatal_signals(pathlib.Path({str(tmp_path)!r}) / str(number), "core")
        fatal(number)
        raise SystemExit
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == ([str(-number) for number in numbers], "")
    for number in numbers:
        # A file of a running process is not touched.
        folder = tmp_path / str(number)
        mine = folder / f"crash-core-{os.getpid()}.open"
        mine.write_text("mine")
        flight_files.collect_crashes(folder)
        mine.unlink()
        if number not in (signal.SIGSEGV, signal.SIGABRT):
            assert files(folder) == []
            continue
        [file] = files(folder)
        assert f"its stacks are in {file}" in caplog.text
        assert file.suffix == ".txt" and "in fatal" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_stacks_of_dead_processes_with_the_number_of_this_one_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stem = f"crash-core-{os.getpid()}"
    for stacks in ("", "first", "second", "", "third"):
        (tmp_path / f"{stem}.open").write_text(stacks)
        with FlightRecorder(tmp_path).guarding():
            assert (tmp_path / f"{stem}.open").read_text() == ""
    kept = {"first": f"{stem}.txt", "second": f"{stem}-2.txt", "third": f"{stem}-3.txt"}
    assert {path.read_text(): path.name for path in tmp_path.glob("*.txt")} == kept
    for name in kept.values():
        assert f"process {os.getpid()} ended by a fatal signal: its stacks are in {tmp_path / name}\n" in caplog.text


def test_the_command_prints_a_file_and_refuses_others(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.handled(0.0, ev.WorkerLost(worker="w-7", reason="\x1b[2J\n"), [])
    recorder.close()
    [file] = files(tmp_path)

    done = run("scheduler_svc.recording.flight", str(file))
    assert done.returncode == 0 and r"reason \x1b[2J\n" in done.stdout and len(done.stdout.splitlines()) == 2
    other = tmp_path / "other"
    for content in ("", "{}\n", "nonsense\n", "[" * 100_000):
        other.write_text(content)
        with pytest.raises(FlightFileError):
            list(lines(other))
    assert run("scheduler_svc.recording.flight", str(other)).returncode == 1


def test_a_file_waits_until_a_thread_can_be_started(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.handled(0.0, LOST, [])
    with no_threads():
        recorder.checked(10.0)
    assert files(tmp_path) == []
    written(recorder, 10.5)
    assert files(tmp_path) == []
    written(recorder, 11.0)
    [file] = files(tmp_path)
    assert next(lines(file)).endswith("worker w-7 was lost")
    # Without one it is written at the end.
    recorder.handled(100.0, LOST, [])
    with no_threads():
        recorder.checked(110.0)
        recorder.close()
    assert len(files(tmp_path)) == 2
