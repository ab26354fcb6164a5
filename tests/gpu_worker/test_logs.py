"""The log: one format, a bounded queue, and a reader of stderr that may stop reading."""

import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest

from gpu_worker import __main__ as program
from gpu_worker import logs
from gpu_worker.checkpoint import files, loading, tokenizer
from gpu_worker.group import pulse
from gpu_worker.settings import WorkerSettings
from tests.rigs.waiting import TIMEOUT_SECONDS

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


class BlockedStream(io.StringIO):
    """Takes one write, then blocks until `opened`, like an unread pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.blocks = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        if text:
            self.blocks.set()
            assert self.opened.wait(TIMEOUT_SECONDS)
        return super().write(text)


@pytest.fixture(autouse=True)
def log_of_the_tests_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "gpu_worker", "gpu_worker.checkpoint")]
    levels = [each.level for each in loggers]
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    logging.captureWarnings(False)
    logs.stop()
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


def written(log_format: str = "text", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.start(level, log_format, stream)
    return stream


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_ranks_of_a_host_warn_once_of_its_files_and_variables(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = {"RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TANDEM_MODLE", "x")
    program.start_log(WorkerSettings(ranks=2))
    for module in (loading, files, tokenizer, pulse):
        logging.getLogger(module.__name__).warning("%s warns", module.__name__)
    logs.stop()
    lines = capsys.readouterr().err.splitlines()
    # Only what differs from rank to rank is logged by each.
    assert len(lines) == (1 if local_rank else 5)
    assert lines[-1].endswith("gpu_worker.group.pulse warns")


def test_text_lines_have_time_process_level_and_message() -> None:
    stream = written()
    logging.getLogger("gpu_worker.link.link").info("joined the scheduler; generation %d", 3)
    logs.stop()
    assert re.fullmatch(rf"{STAMP} worker INFO joined the scheduler; generation 3\n", stream.getvalue())


def test_json_lines_are_objects_with_the_agreed_keys() -> None:
    stream = written("json")
    log = logging.getLogger("gpu_worker.link.link")
    log.warning("two\nlines \x1b[31m")
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("the worker stops because of an unexpected error")
    logs.stop()
    plain, failed = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert list(plain) == ["time", "process", "pid", "level", "message"]
    assert (plain["process"], plain["level"], plain["message"]) == ("worker", "WARNING", "two\nlines \x1b[31m")
    assert datetime.fromisoformat(plain["time"]).tzinfo is not None
    assert failed["error"].startswith("Traceback (most recent call last):")
    assert failed["error"].endswith("KeyError: 'x'")
    assert "\x1b" not in stream.getvalue()


def test_control_characters_are_escaped_and_tracebacks_keep_their_lines() -> None:
    stream = written()
    log = logging.getLogger("gpu_worker")
    log.info("refused: %s", "a\nb\r\x1b]0;title\x07\x9b \u2028 é")
    try:
        raise ValueError("with \x1b[2J inside")
    except ValueError:
        log.exception("failed")
    logs.stop()
    first, second, *trace = stream.getvalue().splitlines()
    assert first.endswith(r"refused: a\nb\r\x1b]0;title\x07\x9b \u2028 é")
    assert second.endswith("ERROR failed")
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == r"ValueError: with \x1b[2J inside"


def test_levels_filter_the_worker_and_libraries_log_only_warnings() -> None:
    stream = written(level="debug")
    logging.getLogger("gpu_worker").debug("ours")
    logging.getLogger("some.library").info("theirs")
    logging.getLogger("some.library").warning("careful")
    logs.stop()
    assert [line.split(" ", 3)[3] for line in stream.getvalue().splitlines()] == ["DEBUG ours", "WARNING careful"]


def test_announcements_pass_every_level() -> None:
    stream = written(level="error")
    log = logging.getLogger("gpu_worker.link.link")
    log.warning("not this")
    logs.announce(log, "ready")
    logs.stop()
    assert re.fullmatch(rf"{STAMP} worker INFO ready\n", stream.getvalue())


def test_warnings_of_python_are_lines_of_the_log() -> None:
    stream = written()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Pytest's own capture replaced the hook.
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old\n  thing", UserWarning, stacklevel=1)
    logs.stop()
    assert re.fullmatch(rf"{STAMP} worker WARNING UserWarning: old thing \(.*test_logs.py:\d+\)\n", stream.getvalue())


def test_libraries_that_write_to_stderr_write_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("library_with_its_own_stderr")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    stream = written()
    logs.adopt_libraries()
    library.warning("deprecated")
    logs.stop()
    assert stream.getvalue().endswith("worker WARNING deprecated\n")
    assert capsys.readouterr().err == ""


def test_a_record_that_cannot_be_formatted_is_reported() -> None:
    stream = io.StringIO()
    handler = logs.QueuedHandler(stream, logs.TextFormat())
    handler.handle(logging.LogRecord("gpu_worker", logging.INFO, "", 0, "%d", ("three",), None))
    handler.stop()
    assert "WARNING a record of gpu_worker cannot be formatted: TypeError" in stream.getvalue()


def test_a_full_queue_drops_records_and_counts_them() -> None:
    stream = BlockedStream()
    handler = logs.QueuedHandler(stream, logs.TextFormat(), max_queued=4)

    def say(number: int) -> None:
        handler.handle(logging.LogRecord("gpu_worker", logging.INFO, "", 0, f"line {number}", (), None))

    say(0)
    assert stream.blocks.wait(TIMEOUT_SECONDS)
    for number in range(1, 10):
        say(number)
    assert handler.num_dropped == 5
    stream.opened.set()
    handler.stop()
    said = [line.split(" ", 4)[4] for line in stream.getvalue().splitlines()]
    assert said == [
        *(f"line {number}" for number in range(5)),
        "dropped 5 log records: the queue was full, stderr was not read",
    ]
    assert handler.num_dropped == 0


def test_the_report_of_drops_precedes_the_next_record() -> None:
    stream = BlockedStream()
    handler = logs.QueuedHandler(stream, logs.TextFormat(), max_queued=2)

    def say(message: str) -> None:
        handler.handle(logging.LogRecord("gpu_worker", logging.INFO, "", 0, message, (), None))

    say("written")
    assert stream.blocks.wait(TIMEOUT_SECONDS)
    for message in ("queued", "queued", "lost", "lost"):
        say(message)
    # Room for the report, not for the record after it.
    handler._lines.get_nowait()
    say("lost too")
    assert handler.num_dropped == 1
    stream.opened.set()
    handler.stop()
    said = [line.split(" ", 4)[4].split(":")[0] for line in stream.getvalue().splitlines()]
    assert said == ["written", "queued", "dropped 2 log records", "dropped 1 log records"]


CHATTERER = """
import logging, os
from gpu_worker import logs
logs.start("info", "text")
log = logging.getLogger("gpu_worker")
number = 0
# The count begins anew whenever the writer has taken a line, which it does until the pipe is full.
while number < 20_000 or logs._handler.num_dropped <= 1_000:
    log.info("line %d %s", number, "x" * 100)
    number += 1
print(logs._handler.num_dropped, flush=True)
logs.stop()
os._exit(0)
"""


def test_a_process_with_unread_stderr_continues() -> None:
    """The pipe holds 1 MiB at most, the queue 1,024 lines; the process logs 3 MB or more and ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHATTERER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert int(process.stdout.readline()) > 1_000
    assert process.wait(TIMEOUT_SECONDS) == 0
    process.stdout.close()
    process.stderr.close()
