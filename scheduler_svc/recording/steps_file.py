"""What each step did, one line per step: the CSV file that --steps writes and `tandem plot` draws.

Owns the file. Lines are gathered and handed to the system whole, about once a second and at the end, so a service that
is killed loses the last second at most. If the disk is full or the file is removed, the writing ends with
one line in the log, and the service continues. Knows nothing of how a step came about.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from scheduler_svc import private_file
from scheduler_svc.core.messages.reports import StepReport

log = logging.getLogger("tandem.core")

# `step`, `preemptions`: since the service started, as in GetLoad. `running`, `waiting`, pages: while the step ran;
# `pages_cached` belong to no request and are kept for later ones. `lane` numbers a worker's time with the service: one
# that comes back has another. `running` and pages are of that lane; `step`, `waiting` and `preemptions` are of all.
# `ms`: the worker's own time. `span_ms`: plan sent to result read, waiting behind the step before it included.
COLUMNS = (
    "step",
    "at_seconds",
    "kind",
    "cause",
    "running",
    "waiting",
    "tokens",
    "prefill_tokens",
    "decode_tokens",
    "output_tokens",
    "pages_used",
    "pages_cached",
    "pages_total",
    "preemptions",
    "lane",
    "generation",
    "ms",
    "span_ms",
)
_WRITE_EVERY_SECONDS = 1.0
# Lines held at most: what a second of the fastest steps may bring, about 100 KB.
_MAX_HELD = 1024


def line_of(report: StepReport, origin: float) -> str:
    """The report's line, its newline included; seconds count from `origin` of the core's clock."""
    return (
        f"{report.step},{report.at - origin:.6f},{report.kind},{report.cause or ''},{report.running},{report.waiting},"
        f"{report.prefill_tokens + report.decode_tokens},{report.prefill_tokens},{report.decode_tokens},"
        f"{report.output_tokens},{report.pages_used},{report.pages_cached},{report.pages_total},{report.preemptions},"
        f"{report.lane},{report.generation},{report.compute_us / 1e3:.3f},{report.span_seconds * 1e3:.3f}\n"
    )


class StepsFile:
    """Writes a fresh file, as the recorder does."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the core's. Raises OSError, FileExistsError where the file exists."""
        # Unbuffered: a buffer of its own would cut lines where it happens to be full.
        self._file = private_file.create(path, buffering=0)
        self._clock = clock
        self._origin = self._written_at = clock()
        self._held: list[str] = [",".join(COLUMNS) + "\n"]
        self._is_broken = False
        self._write()

    def add(self, report: StepReport) -> None:
        """Takes a line in."""
        if self._is_broken:
            return
        self._held.append(line_of(report, self._origin))
        if len(self._held) >= _MAX_HELD:
            self._write()

    def write_due(self) -> None:
        """Called every turn: hands the lines to the system if it is time, so that they outlive this process."""
        if self._held and self._clock() - self._written_at >= _WRITE_EVERY_SECONDS:
            self._write()

    def close(self) -> None:
        """The last lines."""
        self._write()
        self._file.close()

    def _write(self) -> None:
        data, self._held = "".join(self._held).encode(), []
        self._written_at = self._clock()
        if self._is_broken or not data:
            return
        try:
            while data:
                data = data[self._file.write(data) :]
            if not os.fstat(self._file.fileno()).st_nlink:
                self._give_up("it was removed")
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _give_up(self, reason: str) -> None:
        self._is_broken = True
        log.error("%s: no more steps are written: %s", self._file.name, reason)
