"""Makes the page: the numbers of the meter in Prometheus' text format, by `prometheus_client`.

The text is made for at most two requests a second, and a request in between gets the last one: front ends report once a
second only. The thread sleeps again and again, because the core's thread cannot run while this one does.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.catalogue import Kind, Metric, Samples
from scheduler_svc.metrics.core_meter import CoreMeter

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FRESH_SECONDS = 0.5
# With thousands of tenants it takes longer; the thread makes it for a tenth of its time at most.
_FRESH_PART = 10
_PAUSE_SECONDS = 0.0002

# About a millisecond of work.
_SAMPLES_AT_ONCE = 200


class Page:
    """The text. `tenants` returns the names in the token file."""

    def __init__(self, meter: CoreMeter, tenants: Callable[[], Collection[str]]) -> None:
        self._meter = meter
        self._tenants = tenants
        self._text = b""
        self._fresh_until = float("-inf")

    def text(self) -> bytes:
        now = time.monotonic()
        if now >= self._fresh_until:
            self._text = generate_latest(self)  # pyright: ignore[reportArgumentType]
            made_at = time.monotonic()
            self._fresh_until = made_at + max(_FRESH_SECONDS, _FRESH_PART * (made_at - now))
        return self._text

    def collect(self) -> Iterator[Any]:
        """Yields each metric, as a registry does."""
        samples = self._meter.samples(self._tenants())
        for metric in catalogue.METRICS:
            family = _family(metric, samples.get(metric, ()))
            family.samples = _Paused(family.samples)
            yield family


class _Paused(list[Any]):
    """Samples that are gone through with a pause before the first, and after some of them."""

    def __iter__(self) -> Iterator[Any]:
        for idx, sample in enumerate(super().__iter__()):
            if idx % _SAMPLES_AT_ONCE == 0:
                time.sleep(_PAUSE_SECONDS)
            yield sample


_FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}


def _family(metric: Metric, samples: Samples) -> Any:
    family: Any = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
    bounds = [*(repr(float(bound)) for bound in metric.buckets), "+Inf"]
    for labels, value in samples:
        if metric.buckets:
            counts = itertools.accumulate(value[:-1])
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), value[-1])
        else:
            family.add_metric(labels, value)
    return family
