"""Lines that programs print, on their way to a stream: nothing here waits for whoever reads them."""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

_MAX_LINES = 4096


class LineWriter:
    """Writes lines in order to the descriptor of a stream. `None` is a closed standard stream; lines to it are lost.

    When the queue is full, lines are dropped and counted. After a write error the descriptor is not used again.
    """

    def __init__(
        self, stream: TextIO | None, *, max_lines: int = _MAX_LINES, own_line: Callable[[str], str] = str
    ) -> None:
        """`own_line` gives the writer's own message about dropped lines the form of the other lines."""
        self._descriptor = None if stream is None else stream.fileno()
        self._max_lines = max_lines
        self._own_line = own_line
        self._lines: deque[str] = deque()
        self._num_dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        # A daemon, so that a blocked write does not keep this process alive.
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queues one line; never waits."""
        with self._changed:
            if len(self._lines) < self._max_lines:
                self._lines.append(line)
            else:
                self._num_dropped += 1
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Waits, at most `timeout` seconds, until every queued line is written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while text := self._next_text():
            try:
                self._write_all(text.encode(errors="replace"))
            except OSError:
                # The reader has closed the stream.
                self._descriptor = None

    def _next_text(self) -> str:
        """Waits for lines and returns all of them; returns "" if the writer closes and no line is left."""
        with self._changed:
            while not self._lines and not self._closing:
                self._changed.wait()
            lines = list(self._lines)
            self._lines.clear()
            if self._num_dropped:
                dropped = f"{self._num_dropped} lines were dropped because the output was not read in time"
                lines.append(self._own_line(dropped))
                self._num_dropped = 0
        return "".join(f"{line}\n" for line in lines)

    def _write_all(self, data: bytes) -> None:
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
