"""Owns the sums of all front ends' reports, also of front ends that are gone. Knows no sockets.

The core's thread writes, the thread of the page reads: what a sum is made of changes by one assignment, so that no
counter goes back while a process's numbers move to those of processes that are gone.
"""

from collections.abc import Container

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.metrics import catalogue
from scheduler_svc.wire.arrays import WireError

# Processes whose last report is kept. Reports of older ones, which are gone, are one sum.
_MAX_PROCESSES = 256
_MAX_TENANTS = 10_000
# Stands for the number of all processes that are gone.
_GONE = -1

Cells = npt.NDArray[np.float64]


class FrontTotals:
    """What the front ends have reported."""

    def __init__(self) -> None:
        self._of_process: dict[int, Cells] = {_GONE: np.zeros(catalogue.NUM_CELLS)}
        # Each connected front end's backlog, by its name.
        self._backlogs: dict[str, int] = {}
        self._of_tenant: dict[str, dict[int, tuple[int, int]]] = {}

    def take(self, frontend: str, report: frontend_pb2.MetricsReport) -> None:
        """Takes a front end's report. Raises WireError if it does not have the numbers of this version."""
        if len(report.values) != 8 * catalogue.NUM_CELLS:
            raise WireError(f"its metrics have {len(report.values)} bytes instead of {8 * catalogue.NUM_CELLS}")
        cells = np.frombuffer(report.values, "<f8")
        if not np.isfinite(cells).all() or (cells < 0).any():
            raise WireError("its metrics have a number that is negative or not finite")
        if report.process not in self._of_process and len(self._of_process) > _MAX_PROCESSES:
            self._fold(next(each for each in self._of_process if each != _GONE))
        self._of_process[report.process] = cells
        self._backlogs[frontend] = report.backlog_bytes
        for use in report.tenants:
            self._take_tenant(report.process, use)

    def _fold(self, process: int) -> None:
        """Adds a process's numbers to those of processes that are gone."""
        kept = dict(self._of_process)
        folded = kept.pop(process)
        kept[_GONE] = kept[_GONE] + folded
        self._of_process = kept
        for tenant, uses in self._of_tenant.items():
            if process in uses:
                others = dict(uses)
                use, before = others.pop(process), others.get(_GONE, (0, 0))
                others[_GONE] = before[0] + use[0], before[1] + use[1]
                self._of_tenant[tenant] = others

    def _take_tenant(self, process: int, use: frontend_pb2.TenantUse) -> None:
        kept = self._of_tenant.get(use.tenant)
        if kept is None:
            if len(self._of_tenant) >= _MAX_TENANTS:
                return
            kept = self._of_tenant[use.tenant] = {}
        kept[process] = use.prompt_tokens, use.generation_tokens

    def keep(self, frontends: Container[str]) -> None:
        """Forgets the backlogs of all other front ends."""
        self._backlogs = {name: size for name, size in self._backlogs.items() if name in frontends}

    def cells(self) -> Cells:
        """Returns the sums, float64[NUM_CELLS]."""
        return np.sum([*self._of_process.values()], axis=0)

    @property
    def backlog_bytes(self) -> int:
        """The sum over the connected front ends."""
        return sum(self._backlogs.values())

    def of_tenants(self, names: Container[str]) -> dict[str, tuple[int, int]]:
        """Returns prompt and output tokens of those of these tenants that have called."""
        found: dict[str, tuple[int, int]] = {}
        for name, uses in list(self._of_tenant.items()):
            if name in names:
                of_processes = list(uses.values())
                found[name] = sum(one[0] for one in of_processes), sum(one[1] for one in of_processes)
        return found
