"""Counts what the simulator's tally does not: service per tenant, and throughput while the core is busy.

Owns the time window that counts: from the arrival of a tenth of the requests to that of the last. Before it rows fill
and after it they run empty, so a throughput that included both would measure the workload more than the policy.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.worker import SLOT_MASK
from scheduler_svc.simulator.workload import Arrival

FloatArray = npt.NDArray[np.float64]


class Observed(Tally):
    """A tally that counts each tenant. Pass its `watch` the arrivals."""

    def __init__(self, *, tenants: int, requests: int, at_once: int) -> None:
        """`at_once` of the requests arrive before the first step."""
        super().__init__(tenants=tenants)
        self.served: FloatArray = np.zeros(tenants)
        """Tokens by tenant: outputs, and each prompt once its first output token is out."""
        self.asked: FloatArray = np.zeros(tenants)
        """Tokens by tenant of the requests that arrived."""
        self.output_tokens_out = 0
        self.window_served: FloatArray = np.zeros(tenants)
        self.window_asked: FloatArray = np.zeros(tenants)
        self.window_seconds = 0.0
        self.window_outputs = 0
        self.page_seconds = 0.0
        self._opens_at = min(requests - 1, at_once + requests // 10)
        self._opened: tuple[float, FloatArray, FloatArray, int, float] | None = None
        self._seen_at = 0.0
        self._coming: Arrival | None = None
        self._tenant_of: npt.NDArray[np.int64] = np.zeros(1024, np.int64)
        self._prompt_of: npt.NDArray[np.int64] = np.zeros(1024, np.int64)

    def watch(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        """Yields the same arrivals. The simulation enters each one before it takes the next."""
        for arrival in arrivals:
            self._coming = arrival
            yield arrival
        self._close()

    def enter(self, now: float, tenant: int) -> int:
        stream = super().enter(now, tenant)
        coming, slot = self._coming, stream & SLOT_MASK
        assert coming is not None and coming.tenant == tenant
        if slot >= len(self._tenant_of):
            self._tenant_of = np.concatenate([self._tenant_of, np.zeros_like(self._tenant_of)])
            self._prompt_of = np.concatenate([self._prompt_of, np.zeros_like(self._prompt_of)])
        self._tenant_of[slot], self._prompt_of[slot] = tenant, len(coming.prompt)
        self.asked[tenant] += len(coming.prompt) + coming.output_tokens
        self._seen_at = now
        if self.submitted > self._opens_at and self._opened is None:
            used = self.page_seconds_until(now)
            self._opened = now, self.served.copy(), self.asked.copy(), self.output_tokens_out, used
        return stream

    def take(self, output: fx.StepOutput, now: float) -> None:
        slots = (output.streams & np.uint64(SLOT_MASK)).astype(np.int64)
        firsts = slots[output.offsets == 0]
        np.add.at(self.served, self._tenant_of[slots], 1.0)
        np.add.at(self.served, self._tenant_of[firsts], self._prompt_of[firsts].astype(np.float64))
        self.output_tokens_out += len(slots)
        super().take(output, now)

    def page_seconds_until(self, now: float) -> float:
        """Returns the integral of the pages in use over time."""
        point = self._point
        return float(self._integrals[0]) + (0.0 if point is None else (now - point.at) * point.pages_used)

    def _close(self) -> None:
        if self._opened is None:
            return
        at, served, asked, outputs, used = self._opened
        self.window_seconds = self._seen_at - at
        self.window_served, self.window_asked = self.served - served, self.asked - asked
        self.window_outputs = self.output_tokens_out - outputs
        self.page_seconds = self.page_seconds_until(self._seen_at) - used
