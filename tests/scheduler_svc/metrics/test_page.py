"""The page: Prometheus' own parser finds the metrics of the catalogue."""

import numpy as np
import pytest
from prometheus_client import Metric as ParsedMetric
from prometheus_client.parser import text_string_to_metric_families
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.catalogue import Histogram, Kind, Metric
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.metrics.page import Page


def full_meter() -> CoreMeter:
    """A meter with numbers for every label."""
    meter = CoreMeter()
    values = np.arange(1.0, catalogue.NUM_CELLS + 1).tobytes()
    report = frontend_pb2.MetricsReport(process=7, values=values, backlog_bytes=5)
    report.tenants.add(tenant="acme", prompt_tokens=3, generation_tokens=4)
    report.tenants.add(tenant="gone", prompt_tokens=1, generation_tokens=1)
    meter.fronts.take("f-1", report)
    meter.steps[0] = tuple(Histogram(catalogue.STEP_SECONDS.buckets) for _ in catalogue.STEP_KINDS)
    return meter


def families(meter: CoreMeter, *tenants: str) -> dict[str, ParsedMetric]:
    text = Page(meter, lambda: tenants).text().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample_names(metric: Metric) -> set[str]:
    ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
    return {f"{metric.name}{end}" for end in ends}


def test_prometheus_reads_every_metric_with_its_type_and_labels() -> None:
    found = families(full_meter(), "acme")
    # The parser takes the end off the names of counters.
    names = {
        metric: metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
        for metric in catalogue.METRICS
    }
    assert sorted(found) == sorted(names.values())
    for metric, name in names.items():
        family = found[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert {sample.name for sample in family.samples} <= sample_names(metric), name
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} <= {frozenset(metric.labels)}, name
        if metric.values:
            [label] = metric.labels
            assert [sample.labels[label] for sample in family.samples] == list(metric.values)
    # Of a service without workers.
    assert [name for name, family in found.items() if not family.samples] == ["tandem_kv_cache_usage_perc"]


def test_buckets_are_cumulative_and_end_without_a_bound() -> None:
    meter = full_meter()
    spans = meter.histograms[catalogue.PLAN_TO_RESULT]
    spans.observe(0.0004)
    spans.observe(0.0005)
    spans.observe(11.0, 3)
    family = families(meter)["tandem_plan_to_result_seconds"]
    values = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    bounds = [float(bound) for bound in values if bound[0].isdigit()]
    assert bounds == list(catalogue.PLAN_TO_RESULT.buckets)
    assert (values["0.0005"], values["10.0"], values["+Inf"]) == (2, 2, 5)
    assert values["tandem_plan_to_result_seconds_count"] == 5
    assert values["tandem_plan_to_result_seconds_sum"] == pytest.approx(33.0009)


def test_only_tenants_of_the_token_file_are_shown() -> None:
    for tenants, shown in ((("acme", "silent"), ["acme"]), ((), [])):
        family = families(full_meter(), *tenants)["tandem_tenant_prompt_tokens"]
        assert [sample.labels["tenant"] for sample in family.samples] == shown


def test_the_text_is_made_twice_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, now = CoreMeter(), [100.0]
    monkeypatch.setattr("scheduler_svc.metrics.page.time.monotonic", lambda: now[0])
    page = Page(meter, lambda: ())
    first = page.text()
    meter.frontend_deaths += 1
    now[0] += 0.4
    assert page.text() is first
    now[0] += 0.2
    assert b"tandem_frontend_deaths_total 1.0" in page.text()


def test_a_long_text_is_made_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("scheduler_svc.metrics.page.time.monotonic", lambda: now[0])
    monkeypatch.setattr("scheduler_svc.metrics.page._PAUSE_SECONDS", 0.0)

    def slow() -> tuple[str, ...]:
        now[0] += 0.3
        return ()

    page = Page(CoreMeter(), slow)
    first = page.text()
    now[0] += 2.9
    assert page.text() is first
    now[0] += 0.2
    assert page.text() is not first


def test_the_buckets_are_ascending() -> None:
    for metric in catalogue.METRICS:
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
