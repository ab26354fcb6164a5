"""Progress of loading: a bar on a terminal, otherwise a log line every few seconds.

Counts bytes. Knows nothing of models.
"""

import logging
import time
from collections.abc import Callable

from tandem_contract import logs

log = logging.getLogger(__name__)

_LOG_SECONDS, _TERMINAL_SECONDS = 3.0, 0.1
_BAR_WIDTH = 30
_GIB = 1 << 30


class Progress:
    """Counts loaded bytes. `now` returns seconds; `draw` writes to the terminal and is None without one."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        draw: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._draw, self._now = what, max(1, total_bytes), draw, now
        self._interval = _LOG_SECONDS if draw is None else _TERMINAL_SECONDS
        self._done = 0
        self._begun = self._shown = now()

    @classmethod
    def of_this_process(cls, what: str, total_bytes: int) -> "Progress":
        """Progress that draws a bar if stderr is a terminal."""
        return cls(what, total_bytes, draw=logs.draw if logs.can_draw() else None)

    def add(self, num_bytes: int) -> None:
        """Counts `num_bytes` more."""
        self._done = min(self._total, self._done + num_bytes)
        if self._now() - self._shown >= self._interval:
            self._shown = self._now()
            self._show()

    def close(self) -> None:
        """Clears the terminal's line."""
        if self._draw is not None:
            self._draw("\r\x1b[K")

    def _show(self) -> None:
        rate = self._done / max(1e-9, self._shown - self._begun)
        figures = (
            f"{100 * self._done // self._total:3d} %, {self._done / _GIB:.2f} of {self._total / _GIB:.2f} GiB, "
            f"{rate / _GIB:.2f} GiB/s"
        )
        if self._draw is not None:
            filled = _BAR_WIDTH * self._done // self._total
            bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
            self._draw(f"\r\x1b[K{self._what} [{bar}] {figures}")
        else:
            log.info("%s: %s", self._what, figures.strip())
