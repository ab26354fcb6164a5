"""How far loading is, for whoever waits: one line kept up to date on a terminal, else a log line every few seconds.

Knows nothing of models: it is told bytes.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger(__name__)

_LOG_SECONDS, _TERMINAL_SECONDS = 3.0, 0.1
_BAR_WIDTH = 30
_GIB = 1 << 30


class Progress:
    """Told the bytes as they come; `now` gives seconds."""

    def __init__(
        self, what: str, total_bytes: int, *, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._now = what, max(1, total_bytes), now
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._interval = _TERMINAL_SECONDS if self._on_terminal else _LOG_SECONDS
        self._done = 0
        self._begun = self._told = now()

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more are there."""
        self._done = min(self._total, self._done + num_bytes)
        if self._now() - self._told >= self._interval:
            self._told = self._now()
            self._tell()

    def close(self) -> None:
        """Leaves the terminal's line empty for what comes next."""
        if self._on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _tell(self) -> None:
        rate = self._done / max(1e-9, self._told - self._begun)
        figures = (
            f"{100 * self._done // self._total:3d} %, {self._done / _GIB:.2f} of {self._total / _GIB:.2f} GiB, "
            f"{rate / _GIB:.2f} GiB/s"
        )
        if self._on_terminal:
            filled = _BAR_WIDTH * self._done // self._total
            bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
            self._stream.write(f"\r\x1b[K{self._what} [{bar}] {figures}")
            self._stream.flush()
        else:
            log.info("%s: %s", self._what, figures.strip())
