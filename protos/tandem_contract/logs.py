"""The log of a program: its records and those of its libraries, written to stderr by a separate thread.

Owns the form of a line, text or one JSON object, which is also read again among the output of libraries; the queue of
lines; and the writer thread. The reader of an output delays no one: if it is not read, the queue fills, further lines
are dropped and counted, and one line reports the number when there is room again. So it does when stderr is a file
that could not be written, on a full disk say. `tandem serve` writes what it prints in the same way.
"""

import contextlib
import datetime
import json
import logging
import os
import queue
import re
import select
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast

from tandem_contract.needed import NeededThread
from tandem_contract.plural import counted

log = logging.getLogger("tandem")

LogFormat = Literal["text", "json"]
# Most characters of one message, because a peer may have chosen some of them.
_MAX_MESSAGE = 4096
# Control characters, line separators, marks that change the direction of text, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# The values of fields that a text line shows without quotation marks.
_PLAIN = re.compile(r"[\w.:/@+,-]+", re.ASCII)
# Lines without a cause: empty ones, tracebacks, and the stacks that Python writes at a fatal signal, after its name.
_OF_STACKS = re.compile(r"\s*$|  |(Thread|Current thread) 0x|Extension modules: ")
# 2026-11-22 02:12:58.026 core INFO message
_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?P<process>\S.*?) (?P<level>[A-Z]+) (?P<message>.*)")
# Most records that wait for the writer thread.
_CAPACITY = 1024
_FLUSH_SECONDS = 1.0
_NOT_READ = "was not read in time"
# The writer thread rests so long between writes: each time it wakes up, it stops the thread that does the work. Fewer
# lines than the queue holds come in this time.
_PAUSE_SECONDS = 5e-3
# Several processes write to one pipe, and only up to 4,096 bytes are never mixed with others.
_WRITE_CHARS = 2048


def escaped(text: str) -> str:
    """Returns the text with control characters escaped: it is one line then and cannot control a terminal."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class Formatter(logging.Formatter):
    """`2026-11-22 02:12:58.026 core INFO message`, or one JSON object per record."""

    def __init__(self, process: str, log_format: LogFormat) -> None:
        super().__init__()
        self._process = process
        self.is_json = log_format == "json"
        # The last second, as a Unix time and as text, and the offset of local time: what each line needs costs much.
        self._second = (0, "", "")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's line without its newline. A traceback is indented below it, or is `error` in JSON."""
        message = escaped(record.getMessage())
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}… ({counted(len(message) - _MAX_MESSAGE, 'character')} more)"
        error = self._traceback(record)
        second, millisecond = divmod(int(record.created * 1000), 1000)
        if second != self._second[0]:
            self._second = (second, *_texts(second))
        _, moment, zone = self._second
        if self.is_json:
            fields: dict[str, object] = {
                "time": f"{moment.replace(' ', 'T')}.{millisecond:03d}{zone}",
                "process": self._process,
                "pid": record.process,
                "level": record.levelname,
                "message": message,
            }
            fields |= record.__dict__.get("fields", {})
            return json.dumps(fields | {"error": error} if error else fields)
        named = "".join(f" {name}={_shown(value)}" for name, value in record.__dict__.get("fields", {}).items())
        line = f"{moment}.{millisecond:03d} {self._process} {record.levelname} {message}{named}"
        return f"{line}\n{textwrap.indent(error, '    ')}" if error else line

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[0] is None:
            return ""
        return "\n".join(map(escaped, self.formatException(record.exc_info).split("\n")))


def _texts(second: int) -> tuple[str, str]:
    """Local time of a Unix time, and the offset of local time then: `2026-11-22 02:12:58` and `+01:00`."""
    at = datetime.datetime.fromtimestamp(second).astimezone().isoformat(" ")
    return at[:19], at[19:]


def _shown(value: object) -> str:
    """A value as a text line shows it. Quoted strings have only ASCII characters, so nothing in them ends a line."""
    text = str(value)
    if not isinstance(value, str):
        return text
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `process` and `level` are empty if it is not a line of the log."""

    process: str
    level: str
    message: str


def parse(line: str) -> LogLine:
    """Returns the parts of a line in either format. A line of neither format becomes the message."""
    match = _TEXT.fullmatch(line)
    if match is not None:
        return LogLine(match["process"], match["level"], match["message"])
    if line.startswith("{"):
        try:
            record = cast(dict[str, Any], json.loads(line))
            return LogLine(str(record["process"]), str(record["level"]), str(record["message"]))
        except (ValueError, KeyError, RecursionError):
            pass  # This is not a line of the log.
    return LogLine("", "", line)


def may_have_cause(line: str) -> bool:
    """Whether a line of a program's output may say why it ended; those of stacks do not."""
    return not _OF_STACKS.match(line)


def last_line(lines: Iterable[str]) -> str:
    """Returns the message of the last line of a program's output that may have the cause of its end."""
    causes = list(filter(may_have_cause, lines))
    return parse(causes[-1]).message.strip() if causes else "it printed nothing"


def as_json(process: str, line: str, *, level: str = "INFO") -> str:
    """Returns a line of a JSON log: the line itself if it is one, else an object with the line as its message."""
    if line.startswith("{") and parse(line).process:
        return line
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    record = {"time": now, "process": process, "pid": os.getpid(), "level": level, "message": line}
    return json.dumps(record)


def start(process: str, *, level: str, log_format: LogFormat, package: str = log.name) -> None:
    """Sends the records of this process to stderr: its own from `level` on, those of libraries from WARNING on.

    process: its name in every line. package: its loggers are the process's own, like those of `tandem`. When the
    interpreter exits, `logging.shutdown` writes the waiting lines, for at most a second.
    """
    global _handler
    stop()
    _handler = QueuedStderr(Formatter(process, log_format))
    threshold = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.addHandler(_handler)
    root.setLevel(max(threshold, logging.WARNING))
    for name in (log.name, package):
        logging.getLogger(name).setLevel(threshold)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)
    # No line has them, and each record would ask for them.
    logging.logThreads = logging.logMultiprocessing = False
    if sys.version_info >= (3, 12):
        logging.logAsyncioTasks = False
    sys.excepthook = _log_uncaught


def stop() -> None:
    """Writes the waiting lines, for at most a second. Later records are dropped."""
    global _handler
    if _handler is not None:
        handler, _handler = _handler, None
        logging.getLogger().removeHandler(handler)
        handler.close()


def adopt_libraries() -> None:
    """Sends loggers that write to stderr directly through this log. Call it once the libraries are imported."""
    for logger in logging.root.manager.loggerDict.values():
        if not isinstance(logger, logging.Logger):
            continue
        for handler in logger.handlers[:]:
            kind: type = type(handler)
            if kind is logging.StreamHandler:
                logger.removeHandler(handler)
                logger.propagate = True


def announce(message: str, *arguments: object) -> None:
    """Logs a line at every log level, because programs wait for it."""
    log.handle(_record(logging.INFO, message, *arguments))


def log_fields(logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]) -> None:
    """Logs a line with named values: `message name=value …`, or members of the line's JSON object.

    Strings in `fields` may be a caller's: they are escaped, and in a text line quoted unless they are plain words. No
    name may be that of another part of a line (`Formatter`).
    """
    if logger.isEnabledFor(level):
        record = logger.makeRecord(logger.name, level, "", 0, message, (), None)
        record.fields = fields
        logger.handle(record)


def is_worth_a_line(count: int) -> bool:
    """Whether to log the `count`-th event of a kind: the 1st, 2nd, 4th, 8th, so that a peer cannot fill the log."""
    return count & (count - 1) == 0


def can_draw() -> bool:
    """Whether a progress bar may be drawn: stderr is a terminal and the log is text."""
    return _handler is not None and not _handler.is_json and os.isatty(_handler.descriptor)


def draw(text: str) -> None:
    """Writes `text` unformatted, in order with the records."""
    if _handler is not None:
        _handler.lines.put(text)


def closing_line(program: str, cause: str) -> str:
    """Returns the last line of a program that ends for this cause: `program: cause`, or an object of a JSON log."""
    if _handler is None or not _handler.is_json:
        return f"{program}: {escaped(cause)}\n"
    return f"{_handler.format(_record(logging.CRITICAL, cause))}\n"


def open_closed_streams() -> None:
    """Opens /dev/null for each of stdin, stdout and stderr that is closed. Call it before any file is opened.

    Otherwise the next file or socket gets the number 2, and log lines are written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system takes the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)


def to_descriptor(descriptor: int) -> Callable[[bytes], int]:
    """Returns what writes a beginning of its argument to the descriptor, which may not block, as `os.write` does."""

    def write(data: bytes) -> int:
        while True:
            try:
                return os.write(descriptor, data)
            except BlockingIOError:
                select.select([], [descriptor], [])

    return write


class LineWriter:
    """Writes texts in order, whole lines in each write, in a thread of its own: their callers never wait.

    What finds no room in the queue, or cannot be written, is dropped and counted by cause.
    """

    def __init__(
        self, write: Callable[[bytes], int], lost: Callable[[int, str], str], *, capacity: int = _CAPACITY
    ) -> None:
        """`write` is as `to_descriptor` makes it, and may raise OSError.

        `lost` makes the line with the number of texts that were dropped since the last one, and the cause, which
        continues a sentence about the output.
        """
        self._write_some, self._lost = write, lost
        self._room_again = capacity // 2
        self._texts: queue.Queue[str | None] = queue.Queue(capacity)
        self._dropped: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._is_closing = False
        # Whether the last line of the output lacks its end, because a write failed.
        self._is_torn = False
        self._thread = NeededThread(target=self._run, name="log writer")
        self._thread.start()

    def write(self, line: str) -> None:
        self.put(f"{line}\n")

    def put(self, text: str) -> None:
        """Queues text as it is, such as a progress bar."""
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            self._count(1, _NOT_READ)

    def has_room(self) -> bool:
        """Whether a text that comes now has room; if not, it is counted as dropped."""
        if self._texts.full():
            self._count(1, _NOT_READ)
            return False
        return True

    def close(self, seconds: float) -> None:
        """Waits until the queue is written, for at most so long."""
        self._is_closing = True
        if threading.current_thread() is self._thread:
            # It failed, and no other writer reports that.
            while not self._texts.empty():
                self._write(self._texts.get_nowait() or "")
            return
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while texts := self._next_texts():
            if cause := self._write("".join(texts)):
                self._count(len(texts), cause)
            if self._texts.qsize() <= self._room_again:
                self._report_dropped()
            if not self._is_closing:
                time.sleep(_PAUSE_SECONDS)
            elif self._texts.empty():
                return

    def _next_texts(self) -> list[str]:
        """Waits for a text, and returns it with those behind it that fit one write. Empty at the end."""
        texts: list[str] = []
        num_chars = 0
        while not texts or (num_chars < _WRITE_CHARS and not self._texts.empty()):
            if (text := self._texts.get()) is None:
                self._is_closing = True
                break
            texts.append(text)
            num_chars += len(text)
        return texts

    def _report_dropped(self) -> None:
        with self._counting:
            dropped, self._dropped = self._dropped, Counter()
        for cause, number in dropped.items():
            if self._write(f"{self._lost(number, cause)}\n"):
                self._count(number, cause)

    def _count(self, number: int, cause: str) -> None:
        with self._counting:
            self._dropped[cause] += number

    def _write(self, text: str) -> str:
        """Returns why the text was not written, empty if it was; no cause ends this process."""
        data = text.encode(errors="backslashreplace")
        if self._is_torn:
            # Else the first line would continue that one.
            data = b"\n" + data
        num_bytes = len(data)
        try:
            while data:
                data = data[self._write_some(data) :]
        except OSError as error:
            self._is_torn |= len(data) < num_bytes
            return f"could not be written ({error.strerror})"
        self._is_torn = False
        return ""


class QueuedStderr(logging.Handler):
    """Formats records on the caller's thread; another thread writes them to `descriptor`."""

    def __init__(self, formatter: Formatter, descriptor: int = 2, capacity: int = _CAPACITY) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.is_json, self.descriptor = formatter.is_json, descriptor
        self.lines = LineWriter(to_descriptor(descriptor), self._lost, capacity=capacity)

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line, or counts it as dropped if the queue is full."""
        if not self.lines.has_room():
            return
        try:
            line = self.format(record)
        except Exception as error:  # arguments that do not fit the message must not stop the program
            line = self.format(_record(logging.WARNING, "a record of %s cannot be formatted: %r", record.name, error))
        self.lines.write(line)

    def close(self) -> None:
        """Waits until the lines are written, for at most a second."""
        self.lines.close(_FLUSH_SECONDS)
        super().close()

    def _lost(self, number: int, cause: str) -> str:
        what = counted(number, "log record", "were")
        return self.format(_record(logging.WARNING, "%s dropped because stderr %s", what, cause))


_handler: QueuedStderr | None = None


def _record(level: int, message: str, *arguments: object) -> logging.LogRecord:
    return log.makeRecord(log.name, level, "", 0, message, arguments, None)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=(kind, error, trace))


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats one of Python's warnings; replaces `warnings.formatwarning`."""
    return f"{category.__name__}: {' '.join(str(message).split())} ({filename}:{lineno})"
