"""The worker's log: one format, a bounded queue, one writer of stderr.

Owns stderr while the worker runs. `start` sends every record of the process, those of libraries and Python's warnings
included, to a queue of 1,024 lines that a thread writes out. A full queue drops records and counts them, so that a
reader of stderr that stops reading never stops the worker. Imports nothing heavy.
"""

import contextlib
import json
import logging
import queue
import re
import sys
import threading
import time
import traceback
import warnings
from datetime import datetime
from typing import TextIO

MAX_QUEUED = 1024
# Longest wait for queued lines at the end of the process.
FLUSH_SECONDS = 1.0

_log = logging.getLogger(__name__)
# The name of this process in every record.
_process = "worker"
# Characters that a terminal would act on, or that end a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_TRACEBACKS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def escaped(text: str, pattern: re.Pattern[str] = _CONTROL) -> str:
    """`text` with control characters as Python writes them: \\n, \\x1b."""
    return pattern.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


class TextFormat(logging.Formatter):
    """`2026-11-22 02:12:58.026 worker INFO message`, followed by the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        line = f"{stamp} {_process} {record.levelname} {escaped(record.getMessage())}"
        error = _traceback(record)
        return f"{line}\n{escaped(error, _CONTROL_IN_TRACEBACKS)}" if error else line


class JsonFormat(logging.Formatter):
    """One object per line with time, process, pid, level and message, and error if there is a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "process": _process,
            "pid": record.process,
            "level": record.levelname,
            "message": record.getMessage(),
        }
        if error := _traceback(record):
            entry["error"] = error
        return json.dumps(entry)


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return "".join(traceback.format_exception(*record.exc_info)).rstrip()


class QueuedHandler(logging.Handler):
    """Formats records on the caller's thread; another thread writes them."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, *, max_queued: int = MAX_QUEUED) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.num_dropped = 0
        self.stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_queued)
        self._writer = threading.Thread(target=self._write_all, name="log writer", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record, or counts it as dropped. The caller holds the handler's lock."""
        try:
            line = self.format(record) + "\n"
        except Exception as error:  # arguments that do not fit the message must not stop the worker
            line = self._own_line("a record of %s cannot be formatted: %r", record.name, error)
        # The report of drops goes first, where the records are missing.
        if self.num_dropped and not self.put(self._report_of_drops()):
            self.num_dropped += 1
        else:
            self.num_dropped = 0 if self.put(line) else 1

    def stop(self) -> None:
        """Writes queued lines, for FLUSH_SECONDS at most, and ends the writer."""
        until = time.monotonic() + FLUSH_SECONDS
        try:
            self._lines.put(None, timeout=FLUSH_SECONDS)
        except queue.Full:
            return
        self._writer.join(max(0.0, until - time.monotonic()))

    def _own_line(self, message: str, *arguments: object) -> str:
        record = logging.LogRecord(_log.name, logging.WARNING, __file__, 0, message, arguments, None)
        return self.format(record) + "\n"

    def _report_of_drops(self) -> str:
        return self._own_line("dropped %d log records: the queue was full, stderr was not read", self.num_dropped)

    def put(self, text: str) -> bool:
        """Queues text, such as a line or a progress bar. Returns False if the queue is full."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            return False
        return True

    def _write_all(self) -> None:
        line: str | None = ""
        while line is not None:
            line = self._lines.get()
            self._write(line or "")
            if self._lines.empty():
                # Reports drops that no record followed.
                with self.lock:
                    text, self.num_dropped = self._report_of_drops() if self.num_dropped else "", 0
                self._write(text)

    def _write(self, text: str) -> None:
        # If nothing reads stderr any more, the worker continues without a log.
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()


_handler: QueuedHandler | None = None


def start(level: str, log_format: str, stream: TextIO | None = None, *, process: str = "worker") -> None:
    """Sends the process's records to `stream`: its own from `level` on, those of libraries from WARNING on."""
    global _handler, _process
    _process = process
    stop()
    stream = sys.stderr if stream is None else stream
    _handler = QueuedHandler(stream, JsonFormat() if log_format == "json" else TextFormat())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.addHandler(_handler)
    root.setLevel(max(threshold, logging.WARNING))
    logging.getLogger("gpu_worker").setLevel(threshold)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)


def stop() -> None:
    """Writes queued lines, for FLUSH_SECONDS at most. Later records are dropped."""
    global _handler
    if _handler is None:
        return
    handler, _handler = _handler, None
    logging.getLogger().removeHandler(handler)
    handler.stop()


def announce(log: logging.Logger, message: str) -> None:
    """Logs `message` at every level of `log`."""
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, message, (), None))


def is_worth_a_line(count: int) -> bool:
    """Whether to log the `count`-th event of a kind: the 1st, 2nd, 4th, 8th, so that a peer cannot fill the log."""
    return count & (count - 1) == 0


def can_draw() -> bool:
    """Whether a progress bar may be drawn: stderr is a terminal and the log is text."""
    return _handler is not None and _handler.stream.isatty() and isinstance(_handler.formatter, TextFormat)


def closing_line(cause: str) -> str:
    """The last line of a process that ends for this cause, in the format of the log."""
    if _handler is None or not isinstance(_handler.formatter, JsonFormat):
        return f"gpu_worker: {escaped(cause)}\n"
    record = logging.LogRecord("gpu_worker", logging.CRITICAL, __file__, 0, cause, (), None)
    return _handler.formatter.format(record) + "\n"


def draw(text: str) -> None:
    """Writes `text` unformatted, in order with the records."""
    if _handler is not None:
        _handler.put(text)


def adopt_libraries() -> None:
    """Sends loggers that write to stderr directly through this log. Called once the libraries are imported."""
    for logger in logging.root.manager.loggerDict.values():
        if not isinstance(logger, logging.Logger):
            continue
        for handler in logger.handlers[:]:
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)
                logger.propagate = True


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats one of Python's warnings; replaces `warnings.formatwarning`."""
    return f"{category.__name__}: {' '.join(str(message).split())} ({filename}:{lineno})"
