"""Programs that are found, log lines, and the thread that writes lines."""

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem_client.services.lines import LogFile, Repeats, line_writer
from tandem_client.services.programs import missing_programs
from tests.client.fake_service import WAIT_SECONDS


def test_programs_are_found_without_importing_them() -> None:
    before = set(sys.modules)
    assert missing_programs(["this", "no_such_program"]) == ["no_such_program"]
    assert "this" not in set(sys.modules) - before


def test_a_writer_without_a_reader_drops_and_counts_lines() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading) as reader:
        writer = line_writer(stream, max_lines=100, own_line="own: {}".format)
        for n in range(20_000):
            writer.write(f"{n:050}")
        # The pipe is full, so this call times out.
        writer.close(0.01)
        written: list[int] = []
        num_dropped = 0
        while len(written) + num_dropped < 20_000:
            line = reader.readline().rstrip()
            dropped = re.fullmatch(r"own: (\d+) lines were dropped because the output was not read in time", line)
            if dropped is None:
                written.append(int(line))
            else:
                num_dropped += int(dropped[1])
    assert num_dropped > 0
    assert written == sorted(set(written))


def test_a_writer_survives_the_end_of_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        writer = line_writer(stream)
        for _ in range(3):
            writer.write("x")
        writer.close(WAIT_SECONDS)
    assert not writer._thread.is_alive()


class Shown:
    """Lines that are passed on, on a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.repeats = Repeats(lambda name, line: self.lines.append(f"{name}: {line}"), lambda: self.now)

    def take(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken


def test_equal_lines_of_a_program_become_one_and_their_number() -> None:
    shown = Shown()
    for second in range(38):
        shown.repeats.show("worker", f"2026-11-22 02:12:{second % 60:02}.026 worker WARNING no scheduler")
        shown.repeats.show("gateway", f"line {second // 37}")
    assert shown.take() == ["worker: 2026-11-22 02:12:00.026 worker WARNING no scheduler", "gateway: line 0",
                            "gateway: repeated 36 times: line 0", "gateway: line 1"]  # fmt: skip
    shown.repeats.show("worker", "another")
    assert shown.take() == ["worker: repeated 37 times: no scheduler", "worker: another"]


def test_a_number_of_repeats_is_said_after_ten_seconds_and_at_the_end() -> None:
    shown = Shown()
    for _ in range(3):
        shown.repeats.show("worker", "again")
    shown.now = 9.9
    shown.repeats.look()
    assert shown.take() == ["worker: again"]
    shown.now = 10.0
    shown.repeats.look()
    shown.repeats.look()
    assert shown.take() == ["worker: repeated 2 times: again"]
    shown.repeats.show("worker", "again")
    shown.repeats.close()
    assert shown.take() == ["worker: repeated 1 time: again"]


def test_a_log_file_is_private_bounded_and_has_whole_lines(tmp_path: Path) -> None:
    failures: list[str] = []
    log = LogFile(tmp_path / "serve.log", failures.append, max_bytes=100)
    for n in range(50):
        log.write(f"{n:09}\n".encode() * 2)
    files = [tmp_path / "serve.log", tmp_path / "serve.log.1"]
    assert [len(file.read_bytes()) for file in files] == [100, 100] and failures == []
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
    log.write(b"x" * 9 + b"\n" + b"y" * 95 + b"\n")
    assert files[1].read_bytes() == b"x" * 9 + b"\n" and files[0].read_bytes() == b"y" * 95 + b"\n"


def test_a_log_file_on_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    log = LogFile(tmp_path / "serve.log", failures.append)
    log.write(b"before\n")

    def half(descriptor: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        if len(data) < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) - 5])

    with monkeypatch.context() as full:
        full.setattr(os, "write", half)
        log.write(b"whole\npart\n")
        log.write(b"whole\npart\n")
    log.write(b"after\n")
    assert (tmp_path / "serve.log").read_text() == "before\nwhole\nwhole\nafter\n"
    path = tmp_path / "serve.log"
    assert failures == [f"the log {path} cannot be written: No space left on device; lines are missing from it"]
