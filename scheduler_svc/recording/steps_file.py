"""The CSV file that --steps writes and `tandem plot` draws: one line per step, lane reset and joined worker.

Owns the file. Whole lines are written about once a second and at the end, so a service that is killed loses the last
second at most. Lines that a full disk does not take are lost; if the file is removed, the writing ends. Both are
logged, and the service continues. Knows nothing of how the core runs a step.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import StepReport
from scheduler_svc.observer import Observer
from tandem_contract.writing import RecordFile

log = logging.getLogger("tandem.core")

# `step`, `preemptions`: counts since the service started, as in GetLoad.
# `running`, `waiting`, pages: while the step ran. `pages_cached` belong to no request and are cached for later ones.
# `lane` numbers a worker's time with the service; a worker that joins again gets another number. `running` and pages
# are of that lane. `step`, `waiting` and `preemptions` are of the whole service, and so are the last five columns: the
# number of workers, and running requests and pages summed over them. A lost worker is not among them any more.
# `ms`: the worker's own time. `span_ms`: from the plan sent to the result read, including the wait for the step before.
HEADER = (
    "step,at_seconds,kind,cause,running,waiting,"
    "tokens,prefill_tokens,decode_tokens,"
    "output_tokens,pages_used,pages_cached,pages_total,preemptions,"
    "lane,generation,ms,span_ms,"
    "workers,all_running,all_pages_used,all_pages_cached,"
    "all_pages_total\n"
)
_WRITE_EVERY_SECONDS = 1.0
# The largest number of lines in memory: those of one second of the fastest steps, about 100 KB.
_MAX_HELD = 1024


def line_of(report: StepReport, origin: float) -> str:
    """Returns the report's line with its newline; seconds count from `origin` on the core's clock."""
    return (
        f"{report.step},{report.at - origin:.6f},{report.kind},{report.cause or ''},{report.running},{report.waiting},"
        f"{report.prefill_tokens + report.decode_tokens},{report.prefill_tokens},{report.decode_tokens},"
        f"{report.output_tokens},{report.pages_used},{report.pages_cached},{report.pages_total},{report.preemptions},"
        f"{report.lane},{report.generation},{report.compute_us / 1e3:.3f},{report.span_seconds * 1e3:.3f},"
        f"{report.workers},{report.all_running},{report.all_pages_used},{report.all_pages_cached},"
        f"{report.all_pages_total}\n"
    )


class StepsFile(Observer):
    """Writes a new file, as the event log does."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the core's. Raises OSError; FileExistsError if the file exists."""
        self._file = RecordFile(path, log=log, what="the steps file", consequence="lines are lost until it can be")
        self._clock = clock
        self._origin = self._written_at = clock()
        # Lines without it could not be read.
        self._header = HEADER
        self._held: list[str] = []
        self._is_removed = False
        self._write()

    def add(self, report: StepReport) -> None:
        if self._is_removed:
            return
        self._held.append(line_of(report, self._origin))
        if len(self._held) >= _MAX_HELD:
            self._write()

    def handled(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StepReport):
                self.add(effect)

    def turned(self, began: float) -> None:
        """Writes the held lines if a second has passed on the core's clock since the last write."""
        if self._held and self._clock() - self._written_at >= _WRITE_EVERY_SECONDS:
            self._write()

    def close(self) -> None:
        """Writes the last lines and closes the file."""
        self._write()
        self._file.close()

    def _write(self) -> None:
        lines, self._held = self._held, []
        self._written_at = self._clock()
        data = "".join((self._header, *lines)).encode()
        if self._is_removed or not data:
            return
        if self._file.append(data, len(lines)):
            self._header = ""
        if self._file.is_removed():
            self._is_removed = True
            log.error("%s: no more steps are written: it was removed", self._file.path)
