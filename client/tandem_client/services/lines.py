"""Lines that programs print, on their way to a stream or a file: nothing here waits for their reader.

Owns the log file and its size, and which lines are repeats.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tandem_contract import private_file
from tandem_contract.logs import LineWriter, LogLine, parse, to_descriptor
from tandem_contract.plural import numbered

_MAX_LINES = 4096
# The size of the file; the one before it is kept, too.
_MAX_FILE_BYTES = 4 << 20
# How long equal lines are counted before their number is said.
_COUNT_SECONDS = 10.0


def line_writer(
    stream: TextIO | None, *, max_lines: int = _MAX_LINES, own_line: Callable[[str], str] = str
) -> LineWriter:
    """Writes to the descriptor of a stream. `None` is a closed standard stream; what it gets is lost.

    `own_line` gives the writer's own message about dropped lines the form of the other lines.
    """
    write = len if stream is None else to_descriptor(stream.fileno())
    return LineWriter(write, lambda number, cause: own_line(_lost(number, cause)), capacity=max_lines)


def file_writer(file: "LogFile") -> LineWriter:
    return LineWriter(file.write, _lost, capacity=_MAX_LINES)


def _lost(number: int, cause: str) -> str:
    return f"{numbered(number, 'line', 'were')} dropped because the output {cause}"


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

    def write(self, data: bytes) -> int:
        """Appends whole lines; returns their length, also if they cannot be written."""
        left = data
        try:
            while left:
                end = left.rfind(b"\n", 0, self._max_bytes) + 1 or len(left)
                self._append(left[:end])
                left = left[end:]
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._on_failure(f"the log {self.path} cannot be written: {error.strerror}; lines are missing from it")
        return len(data)

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
