"""Lines that programs print, on their way to a stream or a file: nothing here waits for whoever reads them.

Owns the queue and the thread of a writer, the log file and its size, and which lines are repeats.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tandem_contract import private_file
from tandem_contract.logs import LogLine, parse
from tandem_contract.plural import numbered

_MAX_LINES = 4096
# Of the file; the one before it is kept, too.
_MAX_FILE_BYTES = 4 << 20
# How long equal lines are counted before their number is said.
_COUNT_SECONDS = 10.0


class LineWriter:
    """Writes lines in order, in a thread of its own. After an OSError of `write` nothing more is written.

    When the queue is full, lines are dropped and counted.
    """

    def __init__(
        self, write: Callable[[bytes], None], *, max_lines: int = _MAX_LINES, own_line: Callable[[str], str] = str
    ) -> None:
        """`own_line` gives the writer's own message about dropped lines the form of the other lines."""
        self._write = write
        self._max_lines = max_lines
        self._own_line = own_line
        self._texts: deque[str] = deque()
        self._num_dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        # A daemon, so that a blocked write does not keep this process alive.
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queues one line; never waits."""
        self.put(f"{line}\n")

    def put(self, text: str) -> None:
        """Queues text as it is; never waits."""
        with self._changed:
            if len(self._texts) < self._max_lines:
                self._texts.append(text)
            else:
                self._num_dropped += 1
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Waits, at most `timeout` seconds, until everything in the queue is written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        is_open = True
        while text := self._next_text():
            try:
                if is_open:
                    self._write(text.encode(errors="replace"))
            except OSError:
                is_open = False

    def _next_text(self) -> str:
        """Waits for text and returns all there is; returns "" if the writer closes and none is left."""
        with self._changed:
            while not self._texts and not self._closing:
                self._changed.wait()
            texts = list(self._texts)
            self._texts.clear()
            if self._num_dropped:
                dropped = (
                    f"{numbered(self._num_dropped, 'line', 'were')} dropped because the output was not read in time"
                )
                texts.append(f"{self._own_line(dropped)}\n")
                self._num_dropped = 0
        return "".join(texts)


def to_stream(stream: TextIO | None) -> Callable[[bytes], None]:
    """Returns what writes to the descriptor of a stream. `None` is a closed standard stream; what it gets is lost."""
    descriptor = None if stream is None else stream.fileno()

    def write(data: bytes) -> None:
        while data and descriptor is not None:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select([], [descriptor], [])

    return write


class LogFile:
    """Appends to a file of mode 0600. At its largest size it is renamed to NAME.1, and a new one begins.

    If it cannot be written, `on_failure` is called once, with the reason; later lines are tried again. It never has a
    part of a line.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None], *, max_bytes: int = _MAX_FILE_BYTES) -> None:
        self.path = path
        self._on_failure = on_failure
        self._max_bytes = max_bytes
        self._has_failed = False

    def write(self, data: bytes) -> None:
        """Appends whole lines."""
        try:
            while data:
                end = data.rfind(b"\n", 0, self._max_bytes) + 1 or len(data)
                self._append(data[:end])
                data = data[end:]
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._on_failure(f"the log {self.path} cannot be written: {error.strerror}; lines are missing from it")

    def _append(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0, opener=private_file.private) as file:
            place = os.fstat(file.fileno()).st_size
            if not place or place + len(data) <= self._max_bytes:
                _append(file.fileno(), place, data)
                return
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._append(data)


def _append(descriptor: int, place: int, data: bytes) -> None:
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, place + data.rfind(b"\n", 0, written) + 1)
        raise


class Repeats:
    """Passes lines on; of equal ones that a program prints in a row only the first, and then their number."""

    def __init__(self, show: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        # By program: the last line without its time, how often it was repeated, and since when.
        self._last: dict[str, tuple[LogLine, int, float]] = {}

    def show(self, name: str, line: str) -> None:
        """Takes the next line of a program."""
        read, now = parse(line), self._clock()
        last, count, since = self._last.get(name, (None, 0, now))
        if read == last and line.strip():
            self._last[name] = read, count + 1, since if count else now
            self.look()
            return
        self._say(name)
        self._last[name] = read, 0, now
        self._show(name, line)

    def look(self) -> None:
        """Says the numbers that are due. Call it now and then."""
        for name, (_, count, since) in self._last.items():
            if count and self._clock() - since >= _COUNT_SECONDS:
                self._say(name)

    def close(self) -> None:
        """Says all numbers that were not said yet."""
        for name in self._last:
            self._say(name)

    def _say(self, name: str) -> None:
        read, count, since = self._last.get(name, (None, 0, 0.0))
        if read is not None and count:
            self._last[name] = read, 0, since
            self._show(name, f"repeated {numbered(count, 'time')}: {read.message}")
