"""One log format for every process of the service, written to stderr by a separate thread.

Owns the queue of lines, the writer thread and the format. Logging never waits for stderr: if stderr is not read, the
queue fills, further records are dropped and counted, and one line reports the number when there is room again.
"""

import contextlib
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from tandem_contract.log_lines import Formatter, LogFormat

log = logging.getLogger("tandem")

# Most records that wait for the writer thread.
_CAPACITY = 1024
_FLUSH_SECONDS = 1.0
# The writer thread rests so long between writes: each time it wakes up, it stops the thread that does the work. Fewer
# lines than the queue holds come in this time.
_PAUSE_SECONDS = 5e-3
# Several processes write to one pipe, and only up to 4,096 bytes are never mixed with others.
_WRITE_CHARS = 2048


def start(process: str, *, level: str, log_format: LogFormat) -> None:
    """Sends all records of this process to stderr; `process` is its name in every line.

    When the interpreter exits, `logging.shutdown` writes the waiting lines, for at most a second.
    """
    handler = QueuedStderr(Formatter(process, log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # No line has them, and each record would ask for them.
    logging.logThreads = logging.logMultiprocessing = False
    if sys.version_info >= (3, 12):
        logging.logAsyncioTasks = False
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda failed: _log_uncaught(
        failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
    )


def announce(message: str, *arguments: object) -> None:
    """Logs a line at every log level, because programs wait for it."""
    log.handle(log.makeRecord(log.name, logging.INFO, "", 0, message, arguments, None))


def log_fields(logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]) -> None:
    """Logs a line with named values: `message name=value …`, or members of the line's JSON object.

    Strings in `fields` may be a caller's: they are escaped, and in a text line quoted unless they are plain words. No
    name may be that of another part of a line (`Formatter`).
    """
    if logger.isEnabledFor(level):
        record = logger.makeRecord(logger.name, level, "", 0, message, (), None)
        record.fields = fields
        logger.handle(record)


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


class QueuedStderr(logging.Handler):
    """Passes lines to a thread that writes them to `descriptor`, whole lines in each write."""

    def __init__(self, formatter: logging.Formatter, descriptor: int = 2, capacity: int = _CAPACITY) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = descriptor
        self._room_again = capacity // 2
        self._lines: queue.Queue[str | None] = queue.Queue(capacity)
        self._num_dropped = 0
        self._counting = threading.Lock()
        self._is_closing = False
        self._writer = threading.Thread(target=self._write_all, name="log writer", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line, or counts it as dropped if the queue is full."""
        try:
            if self._lines.full():
                raise queue.Full
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._count(1)

    def close(self) -> None:
        """Waits until the lines are written, for at most a second."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._writer.join(_FLUSH_SECONDS)
        super().close()

    def _write_all(self) -> None:
        while lines := self._next_lines():
            if not self._write("\n".join(lines)):
                self._count(len(lines))
            if self._lines.qsize() <= self._room_again:
                self._report_dropped()
            if not self._is_closing:
                time.sleep(_PAUSE_SECONDS)
            elif self._lines.empty():
                return

    def _next_lines(self) -> list[str]:
        """Waits for a line, and returns it with those behind it that fit one write. Empty at the end."""
        lines: list[str] = []
        num_chars = 0
        while not lines or (num_chars < _WRITE_CHARS and not self._lines.empty()):
            if (line := self._lines.get()) is None:
                self._is_closing = True
                break
            lines.append(line)
            num_chars += len(line)
        return lines

    def _report_dropped(self) -> None:
        with self._counting:
            num_dropped, self._num_dropped = self._num_dropped, 0
        if not num_dropped:
            return
        text = "%s log records were dropped because stderr was not read fast enough"
        record = log.makeRecord(log.name, logging.WARNING, "", 0, text, (f"{num_dropped:,}",), None)
        if not self._write(self.format(record)):
            self._count(num_dropped)

    def _count(self, number: int) -> None:
        with self._counting:
            self._num_dropped += number

    def _write(self, line: str) -> bool:
        """Returns whether the line was written; a closed pipe or a full disk does not end this process."""
        data = f"{line}\n".encode(errors="backslashreplace")
        try:
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])
        except OSError:
            return False
        return True


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=(kind, error, trace))
