"""Owns what one front end measures: counts and histograms of its requests since its process began, and the report.

Knows neither gRPC nor streams. The report has the state, not its changes, so that none is counted twice.
"""

import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.catalogue import Histogram, Metric

# In one report. The core's thread reads it, and there may be 10,000 of them.
_MAX_TENANTS = 256


@dataclass(slots=True, eq=False)
class TenantUse:
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(slots=True, eq=False)
class SampleMeter:
    """The tokens of one sample, as they leave in deltas."""

    _front: "FrontMeter"
    _stream: "StreamMeter"
    _num_counted: int = 0
    # When, on the meter's clock, the last delta left; 0 before the first.
    _last_at: float = 0.0

    def skip(self, num_tokens: int, *, num_received: int) -> None:
        """The sample of a resumed stream has its output so far; its caller has `num_received` tokens of it already."""
        self._add(num_tokens - num_received)
        self._num_counted, self._last_at = num_tokens, self._front.clock()

    def sent(self, num_tokens: int) -> None:
        """A delta leaves; the sample has sent `num_tokens` tokens now."""
        num_new = num_tokens - self._num_counted
        if num_new <= 0:
            return
        self._num_counted = num_tokens
        front, last_at = self._front, self._last_at
        now = self._last_at = front.clock()
        self._add(num_new)
        if last_at:
            front.between_tokens.observe((now - last_at) / num_new, num_new)
        else:
            self._stream.first_token(now)

    def over(self, num_tokens: int) -> None:
        """The sample has ended; the last tokens may have shown nothing."""
        self._add(num_tokens - self._num_counted)
        self._num_counted = num_tokens

    def _add(self, num_tokens: int) -> None:
        self._front.generation_tokens += num_tokens
        if (use := self._stream.use) is not None:
            use.generation_tokens += num_tokens


class StreamMeter:
    """One call of Generate or Resume."""

    __slots__ = ("_began", "_front", "_has_first", "_is_resumed", "is_accepted", "use")

    def __init__(self, front: "FrontMeter", *, is_resumed: bool) -> None:
        self._front = front
        self._began = front.clock()
        # Its first token may have left in another stream.
        self._has_first = self._is_resumed = is_resumed
        self.is_accepted = False
        self.use: TenantUse | None = None

    def accepted(self, prompt_tokens: int, tenant: str) -> None:
        """The caller gets Accepted. `tenant` is a name of the token file; "" without one."""
        self.is_accepted = True
        if tenant:
            self.use = self._front.tenants.setdefault(tenant, TenantUse())
        if self._is_resumed:
            return
        self._front.prompt_tokens += prompt_tokens
        if self.use is not None:
            self.use.prompt_tokens += prompt_tokens

    def sample(self) -> SampleMeter:
        return SampleMeter(self._front, self)

    def first_token(self, now: float) -> None:
        """A sample's first token leaves; the first one of all samples counts."""
        if not self._has_first:
            self._has_first = True
            self._front.first_token.observe(now - self._began)

    def refused(self, code: str) -> None:
        """The call ends with the status `code` (UNAVAILABLE), or its caller leaves (CANCELLED)."""
        if self.is_accepted:
            self._front.count(catalogue.FAILURES, code.lower())
        elif not self._is_resumed and code != "CANCELLED":
            self._front.rejected(code)

    def finished(self, summary: pb.Summary, reasons: Sequence[pb.FinishReason.ValueType]) -> None:
        """The caller gets the Summary; `reasons` are the samples' FinishReasons."""
        front, usage, timing = self._front, summary.usage, summary.timing
        for reason in reasons:
            front.count(catalogue.SUCCESSES, _REASONS[reason])
        front.count(catalogue.DISCARDED, number=usage.discarded_tokens)
        front.count(catalogue.RECOMPUTED, number=usage.recomputed_tokens)
        front.count(catalogue.CHANGES_SURVIVED, number=timing.worker_changes)
        observed = {
            catalogue.LATENCY: timing.total_seconds if self._is_resumed else front.clock() - self._began,
            catalogue.QUEUE_TIME: timing.queue_seconds,
            catalogue.PREFILL_TIME: timing.prefill_seconds,
            catalogue.DECODE_TIME: timing.decode_seconds,
            catalogue.REQUEST_PROMPT: usage.prompt_tokens,
            catalogue.REQUEST_OUTPUT: usage.output_tokens,
        }
        # Tokens after the first one of each sample: those have gaps before them.
        if (num_gaps := usage.output_tokens - len(reasons)) > 0:
            observed[catalogue.PER_TOKEN] = timing.decode_seconds * len(reasons) / num_gaps
        for metric, value in observed.items():
            front.histograms[metric].observe(value)


class FrontMeter:
    """All requests of one front end. `clock` is monotonic, in seconds, and never 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.prompt_tokens = self.generation_tokens = 0
        self._process = secrets.randbits(64)
        self._counts = {metric: [0] * metric.num_cells for metric in catalogue.FRONTEND_METRICS if not metric.buckets}
        self.histograms = {metric: Histogram(metric.buckets) for metric in catalogue.FRONTEND_METRICS if metric.buckets}
        # Used for every delta.
        self.between_tokens = self.histograms[catalogue.BETWEEN_TOKENS]
        self.first_token = self.histograms[catalogue.FIRST_TOKEN]
        # At most as many as names in the token file.
        self.tenants: dict[str, TenantUse] = {}
        self._reported: dict[str, tuple[int, int]] = {}
        # The index of the tenant that the next report looks at first.
        self._next_tenant = 0

    def stream(self, *, is_resumed: bool = False) -> StreamMeter:
        """Returns the meter of a call that begins now."""
        return StreamMeter(self, is_resumed=is_resumed)

    def count(self, metric: Metric, label: str = "", number: int = 1) -> None:
        """Adds to a counter; `label` is one of its known values, if it has any."""
        self._counts[metric][metric.values.index(label) if label else 0] += number

    def rejected(self, code: str) -> None:
        """A Generate call is refused with this status (UNAVAILABLE)."""
        self.count(catalogue.REJECTIONS, code.lower())

    def constraint_refused(self, reason: str) -> None:
        """A constraint is refused for one of `catalogue.CONSTRAINT_REASONS`."""
        self.count(catalogue.CONSTRAINT_REFUSALS, reason)

    def trial_ended(self, *, was_killed: bool) -> None:
        self.count(catalogue.TRIALS)
        self.count(catalogue.TRIAL_KILLS, number=was_killed)

    def report(self, backlog_bytes: int) -> frontend_pb2.MetricsReport:
        """Returns the state of all counts, and tenants with counts that changed since the last report."""
        self._counts[catalogue.PROMPT_TOKENS][0] = self.prompt_tokens
        self._counts[catalogue.GENERATION_TOKENS][0] = self.generation_tokens
        values = array("d")
        for metric in catalogue.FRONTEND_METRICS:
            values.extend(self.histograms[metric].cells() if metric.buckets else self._counts[metric])
        report = frontend_pb2.MetricsReport(process=self._process, values=values.tobytes(), backlog_bytes=backlog_bytes)
        for tenant in self._changed_tenants():
            use = self.tenants[tenant]
            self._reported[tenant] = use.prompt_tokens, use.generation_tokens
            report.tenants.add(tenant=tenant, prompt_tokens=use.prompt_tokens, generation_tokens=use.generation_tokens)
        return report

    def _changed_tenants(self) -> list[str]:
        """Returns those that the next report has. If more have changed, all of them get their turn."""
        tenants, at = list(self.tenants.items()), self._next_tenant
        changed: list[str] = []
        for idx, (tenant, use) in enumerate([*tenants[at:], *tenants[:at]], start=at + 1):
            if self._reported.get(tenant) != (use.prompt_tokens, use.generation_tokens):
                changed.append(tenant)
                if len(changed) == _MAX_TENANTS:
                    self._next_tenant = idx % len(tenants)
                    break
        return changed

    def connection_lost(self) -> None:
        """The last reports may not have arrived, so the next one has every tenant."""
        self._reported.clear()


_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{name.upper()}"): name for name in catalogue.REASONS}
