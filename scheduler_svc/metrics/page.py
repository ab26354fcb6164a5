"""Makes the page: the numbers of the meter in Prometheus' text format, by `prometheus_client`.

The text is made for at most two requests a second, and a request in between gets the last one: front ends report once a
second only. The thread sleeps again and again, because the core's thread cannot run while this one does.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.catalogue import Kind, Metric
from scheduler_svc.metrics.core_meter import CoreMeter

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FRESH_SECONDS = 0.5
# With thousands of tenants it takes longer; the thread makes it for a tenth of its time at most.
_FRESH_PART = 10
_PAUSE_SECONDS = 0.0002

# About a millisecond of work.
_SAMPLES_AT_ONCE = 200

# The values of the labels, and the number; of a histogram the count of each bucket, and the sum.
Samples = list[tuple[tuple[str, ...], float]]
HistogramSamples = list[tuple[tuple[str, ...], list[float]]]


class Page:
    """The text. `tenants` returns the names in the token file."""

    def __init__(self, meter: CoreMeter, tenants: Callable[[], Collection[str]]) -> None:
        self._meter = meter
        self._tenants = tenants
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        self._text = b""
        self._fresh_until = float("-inf")

    def text(self) -> bytes:
        """Returns the page."""
        now = time.monotonic()
        if now >= self._fresh_until:
            self._text = generate_latest(self._registry)
            made_at = time.monotonic()
            self._fresh_until = made_at + max(_FRESH_SECONDS, _FRESH_PART * (made_at - now))
        return self._text

    def collect(self) -> Iterator[Any]:
        """Yields each metric, for the registry."""
        of_fronts = self._of_fronts()
        of_core = self._of_core()
        histograms = self._histograms()
        for metric in catalogue.METRICS:
            samples: Any = of_fronts.get(metric) or of_core.get(metric) or histograms.get(metric) or []
            family = _family(metric, samples)
            family.samples = _Paused(family.samples)
            yield family

    def _of_fronts(self) -> dict[Metric, Any]:
        totals = self._meter.fronts
        cells, at = totals.cells().tolist(), 0
        found: dict[Metric, Any] = {}
        for metric in catalogue.FRONTEND_METRICS:
            own = cells[at : at + metric.num_cells]
            at += metric.num_cells
            if metric.kind is Kind.HISTOGRAM:
                found[metric] = [((), own)]
            else:
                found[metric] = _labelled(metric, own)
        found[catalogue.BACKLOG] = [((), totals.backlog_bytes)]
        of_tenants = totals.of_tenants(self._tenants()).items()
        found[catalogue.TENANT_PROMPT] = [((name,), use[0]) for name, use in of_tenants]
        found[catalogue.TENANT_OUTPUT] = [((name,), use[1]) for name, use in of_tenants]
        return found

    def _of_core(self) -> dict[Metric, Samples]:
        look = self._meter.last_look
        values: dict[Metric, float] = {
            catalogue.RUNNING: look.running,
            catalogue.WAITING: look.waiting,
            catalogue.CACHE_QUERIES: look.cache_queries,
            catalogue.CACHE_HITS: look.cache_hits,
            catalogue.PREEMPTIONS: look.preemptions,
            catalogue.NOT_SERVING_SINCE: look.not_serving_since,
            catalogue.WORKERS: look.workers,
            catalogue.STANDBY_WORKERS: look.standby_workers,
            catalogue.FRONTENDS: look.frontends,
            catalogue.DEATHS: self._meter.frontend_deaths,
        }
        return {
            **{metric: [((), value)] for metric, value in values.items()},
            catalogue.KV_USAGE: [((str(place),), usage) for place, usage in look.kv_usage],
            catalogue.NOT_SERVING: _labelled(catalogue.NOT_SERVING, list(look.not_serving)),
            catalogue.RESETS: _labelled(catalogue.RESETS, list(look.resets)),
        }

    def _histograms(self) -> dict[Metric, HistogramSamples]:
        meter = self._meter
        single = {
            catalogue.STEP_TOKENS: meter.step_tokens,
            catalogue.PLAN_TO_RESULT: meter.plan_to_result,
            catalogue.CORE_STEP: meter.core_step,
        }
        of_steps: HistogramSamples = [
            ((str(place), kind), histogram.cells())
            for place, kinds in list(meter.steps.items())
            for kind, histogram in zip(catalogue.STEP_KINDS, kinds, strict=True)
        ]
        return {
            **{metric: [((), histogram.cells())] for metric, histogram in single.items()},
            catalogue.STEP_SECONDS: of_steps,
        }


class _Paused(list[Any]):
    """Samples that are gone through with a pause before the first, and after some of them."""

    def __iter__(self) -> Iterator[Any]:
        for idx, sample in enumerate(super().__iter__()):
            if idx % _SAMPLES_AT_ONCE == 0:
                time.sleep(_PAUSE_SECONDS)
            yield sample


def _labelled(metric: Metric, values: list[float]) -> Samples:
    """The numbers of a metric whose label has known values."""
    if not metric.values:
        return [((), value) for value in values]
    return [((label,), value) for label, value in zip(metric.values, values, strict=True)]


def _family(metric: Metric, samples: Any) -> Any:
    match metric.kind:
        case Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            bounds = [*(repr(float(bound)) for bound in metric.buckets), "+Inf"]
            for labels, cells in samples:
                counts = itertools.accumulate(cells[:-1])
                family.add_metric(labels, list(zip(bounds, counts, strict=True)), cells[-1])
            return family
        case Kind.COUNTER:
            family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        case Kind.GAUGE:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
