"""The log: its two formats, its escapes, and that nothing waits for a stderr that is not read."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tandem_contract.logs import Formatter, LogFormat, LogLine, QueuedStderr, as_json, escaped, last_line, parse
from tests.rigs.small_disk import run_on_small_disk
from tests.rigs.waiting import TIMEOUT_SECONDS

ESCAPES = "\x1b[2J\r\n2026-11-22 core INFO forged\x00\x9b\u2028\u202e\udc80"


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    made = logging.LogRecord("tandem.core", logging.INFO, "", 0, message, arguments, None)
    made.created = 1_795_313_578.026
    made.exc_info = (type(error), error, error.__traceback__) if error is not None else None
    return made


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_a_text_line_has_time_process_level_and_message() -> None:
    at = datetime.fromtimestamp(1_795_313_578.026).strftime("%Y-%m-%d %H:%M:%S")
    assert Formatter("core", "text").format(record("%d of %s", 3, "four")) == f"{at}.026 core INFO 3 of four"


def test_a_json_line_is_one_object_with_the_parts_of_a_text_line() -> None:
    line = Formatter("frontend-2", "json").format(record("message", error=raised("cause\nin two lines")))
    assert "\n" not in line
    fields = json.loads(line)
    at = datetime.fromisoformat(fields.pop("time"))
    assert (at.timestamp(), at.utcoffset() is not None) == (1_795_313_578.026, True)
    assert fields.pop("error").endswith("ValueError: cause\nin two lines")
    assert fields == {"process": "frontend-2", "pid": os.getpid(), "level": "INFO", "message": "message"}
    assert "error" not in json.loads(Formatter("core", "json").format(record("message")))


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_control_characters_of_a_peer_are_escaped(log_format: LogFormat) -> None:
    formatter = Formatter("core", log_format)
    line = formatter.format(record("worker %s", ESCAPES))
    shown = json.loads(line)["message"] if log_format == "json" else line
    assert shown.endswith(r"\x1b[2J\r\n2026-11-22 core INFO forged\x00\x9b\u2028\u202e\udc80")
    assert line.isprintable()
    line = formatter.format(record("failed", error=raised(ESCAPES)))
    assert "\x1b" not in line.encode().decode()
    # A forged line is indented like the rest of its traceback.
    assert not [one for one in line.split("\n")[1:] if not one.startswith("    ")]


def test_text_without_control_characters_is_unchanged() -> None:
    text = "Zürich, 東京: \\x1b, 50 %, “quoted”"
    assert escaped(text) == text


def test_a_long_message_is_cut() -> None:
    line = Formatter("core", "text").format(record("x" * 1_000_000))
    assert len(line) < 5000
    assert line.endswith("x… (995,904 characters more)")


def test_a_record_that_cannot_be_formatted_is_reported(pipe: "Pipe") -> None:
    handler = pipe.handler()
    handler.handle(record("%d", "three"))
    assert "core WARNING a record of tandem.core cannot be formatted: TypeError" in pipe.read_until("TypeError")[0]
    handler.close()


@pytest.mark.parametrize("process", ["core", "frontend-2", "worker rank 3"])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_is_read_as_it_was_made(process: str, log_format: LogFormat) -> None:
    line = Formatter(process, log_format).format(record("IN UPPER case: %s", "a\nb"))
    assert parse(line) == LogLine(process, "INFO", "IN UPPER case: a\\nb")
    made = as_json("serve", line)
    assert made == line if log_format == "json" else json.loads(made)["message"] == line


@pytest.mark.parametrize(
    "line",
    ["{", "{}", "[1]", '{"process": 1}', '{"process": "core"', '{"a":' * 12_000, "worker: no device", "\x1b[2J\u2028"],
)
def test_a_line_of_no_log_is_the_message(line: str) -> None:
    assert parse(line) == LogLine("", "", line)
    made = as_json("serve", line, level="ERROR")
    fields, ours = json.loads(made), json.loads(Formatter("core", "json").format(record("message")))
    assert (fields["process"], fields["level"], fields["message"]) == ("serve", "ERROR", line)
    assert fields.keys() == ours.keys() and made.isascii()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_last_line_of_a_program_is_the_last_that_may_have_the_cause(log_format: LogFormat) -> None:
    formatter = Formatter("core", log_format)
    failed = formatter.format(record("failed", error=raised("cause"))).split("\n")
    stacks = ["", "  File x", "Thread 0x1 (most recent call first):", "Current thread 0x2", "Extension modules: a"]
    assert last_line([formatter.format(record("before")), *failed, *stacks]) == "failed"
    assert last_line(["before", "Fatal Python error: Aborted", *stacks]) == "Fatal Python error: Aborted"
    assert last_line(stacks) == last_line([]) == "it printed nothing"


class Pipe:
    """A pipe in place of stderr, which a test may leave unread."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def handler(self, **options: int) -> QueuedStderr:
        return QueuedStderr(Formatter("core", "text"), descriptor=self.writing, **options)

    def fill(self) -> None:
        """Fills the pipe until a writer has to wait."""
        os.set_blocking(self.writing, False)
        try:
            while True:
                os.write(self.writing, b"\n" * 4096)
        except BlockingIOError:
            os.set_blocking(self.writing, True)

    def read_until(self, words: str) -> list[str]:
        """Returns the lines up to one with these words, without the empty lines that filled the pipe."""
        data = b""
        while words not in data.decode():
            data += os.read(self.reading, 65_536)
        return [line for line in data.decode().splitlines() if line]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reading)
    os.close(pipe.writing)


def test_records_are_dropped_and_counted_when_the_queue_is_full(pipe: Pipe) -> None:
    pipe.fill()
    handler = pipe.handler(capacity=10)
    for number in range(1000):
        handler.handle(record("record %d", number))
    lines = pipe.read_until("were dropped")
    handler.handle(record("after"))
    lines += pipe.read_until("after")
    [said] = [line for line in lines if "dropped" in line]
    kept = [line for line in lines[:-1] if line != said]
    numbers = [int(line.split()[-1]) for line in kept]
    assert numbers[:10] == list(range(10))
    # The writer holds lines outside the queue, so some more fit whenever it takes a batch.
    assert numbers == sorted(set(numbers)) and len(numbers) <= 40
    assert f"WARNING {1000 - len(kept)} log records were dropped" in said
    handler.close()


def test_no_record_is_dropped_while_stderr_is_read(pipe: Pipe) -> None:
    handler = pipe.handler()
    for number in range(500):
        handler.handle(record("record %d", number))
    lines = pipe.read_until("record 499")
    assert [line.split()[-1] for line in lines] == [str(number) for number in range(500)]
    handler.close()


def test_close_returns_although_stderr_is_not_read(pipe: Pipe) -> None:
    pipe.fill()
    handler = pipe.handler(capacity=2)
    for _ in range(10):
        handler.handle(record("lost"))
    closing = threading.Thread(target=handler.close)
    closing.start()
    closing.join(TIMEOUT_SECONDS)
    assert not closing.is_alive()


PROGRAM = """
import logging, sys, threading, warnings
from tandem_contract import logs, needed
logs.open_closed_streams(); main = needed.ends_with_needed("core"); main.__enter__()
file = open(sys.argv[1], "w")
library = logging.getLogger("library_with_its_own_stderr")
library.addHandler(logging.StreamHandler())
library.propagate = False
logs.start(sys.argv[2], level=sys.argv[3], log_format="text", package="mine")
logs.adopt_libraries()
library.warning("deprecated")
logging.getLogger("some.library").info("not this")
logging.getLogger("mine.part").info("from %s on", "info")
logs.announce("ready: %s", "at every level")
logs.draw("50 %\\r100 %\\n")
warnings.warn("old\\n  thing")
thread = threading.Thread(target=lambda: 1 / 0, name="its own")
thread.start()
thread.join()
logs.draw(logs.closing_line("program", "cause\\nof the end"))
raise SystemExit(logs.stop() or "the end") if sys.argv[4:] else ValueError("the end")
"""


def started(tmp_path: Path, *words: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), *words]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


def test_own_records_pass_from_the_level_on_and_those_of_libraries_from_warning_on(tmp_path: Path) -> None:
    done = started(tmp_path, "core", "info", "exits")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("    ")]
    assert [line.rpartition(" core ")[2] for line in lines] == [
        "WARNING deprecated",
        "INFO from info on",
        "INFO ready: at every level",
        "50 %",
        "100 %",
        "WARNING UserWarning: old thing (<string>:16)",
        "CRITICAL uncaught exception in thread its own",
        r"program: cause\nof the end",
        "the end",
    ]


def test_announcements_and_uncaught_exceptions_are_logged_at_every_level(tmp_path: Path) -> None:
    done = started(tmp_path, "core", "error")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("    ")]
    assert [line.split(" core ")[1] for line in lines if " core " in line] == [
        "INFO ready: at every level",
        "CRITICAL uncaught exception in thread its own",
        "CRITICAL uncaught exception",
    ]
    assert "    ZeroDivisionError: division by zero" in done.stderr.splitlines()
    assert done.stderr.splitlines()[-1] == "    ValueError: the end"


def test_no_line_is_written_into_a_file_that_got_the_number_of_a_closed_stderr(tmp_path: Path) -> None:
    done = started(tmp_path, "core", "error", shell="0<&- 1>&- 2>&-")
    assert done.returncode == 1
    assert (tmp_path / "file").read_text() == ""


CHATTERER = """
import logging
from tandem_contract import logs
logs.start("core", level="info", log_format="text")
for number in range(20_000):
    logging.getLogger("tandem").info("line %d %s", number, "x" * 100)
print("done", flush=True)
"""


def test_a_process_with_unread_stderr_continues() -> None:
    """The pipe holds 1 MiB at most, the queue 1,024 lines; the process logs 3 MB and ends."""
    with subprocess.Popen(
        [sys.executable, "-c", CHATTERER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "done\n"
        assert process.wait(TIMEOUT_SECONDS) == 0


FULL = """
import logging, os, sys, time
from pathlib import Path
from tandem_contract import logs
disk = Path(sys.argv[1])
log = disk / "log"
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
logs.start("core", level="info", log_format="text")
own = logging.getLogger("tandem")
(disk / "ballast").write_bytes(bytes(64 << 10))

def until(met):
    end = time.monotonic() + 20
    while not met() and time.monotonic() < end:
        own.info("a line of %s", "x" * 200)
        time.sleep(0.001)

until(lambda: logs._handler.lines._dropped)
size = log.stat().st_size
os.unlink(disk / "ballast")
until(lambda: b"were dropped" in log.read_bytes())
logs.stop()
lines = log.read_text().splitlines()
print(size)
said = "log records were dropped because stderr could not be written (No space left on device)"
print(sum(said in each for each in lines))
print(sum(not (each.endswith("x" * 200) or "were dropped" in each) for each in lines))
print(sum(each.count(" core ") > 1 for each in lines))
"""


def test_a_full_disk_under_the_log_loses_lines_and_says_so(tmp_path: Path) -> None:
    lines = run_on_small_disk(tmp_path, "128k", FULL)
    size, said, torn, mixed = map(int, lines)
    assert size > 40_000 and said == 1
    assert torn <= 1 and mixed == 0, "one line may be cut, and no other is behind it"
