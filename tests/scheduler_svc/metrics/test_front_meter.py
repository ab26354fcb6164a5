"""What a front end measures and reports, and the sum of reports over front ends that come and go."""

from itertools import count

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.metrics import catalogue, core_meter, front_meter
from scheduler_svc.metrics.catalogue import Kind, Metric
from scheduler_svc.metrics.core_meter import FrontTotals
from scheduler_svc.metrics.front_meter import FrontMeter, StreamMeter
from tandem_contract.bounds import WireError
from tests.rigs.instructions import at_every_instruction


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def cells_of(metric: Metric, cells: np.ndarray) -> list[float]:
    at = sum(one.num_cells for one in catalogue.FRONTEND_METRICS[: catalogue.FRONTEND_METRICS.index(metric)])
    return cells[at : at + metric.num_cells].tolist()


def reported(meter: FrontMeter) -> dict[Metric, list[float]]:
    cells = np.frombuffer(meter.report(0).values)
    return {metric: cells_of(metric, cells) for metric in catalogue.FRONTEND_METRICS}


def histogram(values: list[float], cells: list[float], metric: Metric) -> None:
    """Asserts that the cells are those of these values."""
    edges = [-np.inf, *np.nextafter(metric.buckets, np.inf), np.inf]
    assert cells[:-1] == np.histogram(values, edges)[0].tolist()
    assert cells[-1] == pytest.approx(sum(values))


def summary(output: int, **timing: float) -> pb.Summary:
    usage = pb.Usage(prompt_tokens=7, output_tokens=output, discarded_tokens=2, recomputed_tokens=30)
    return pb.Summary(usage=usage, timing=pb.Timing(**timing))  # type: ignore[arg-type]


def test_a_delta_of_n_tokens_is_n_equal_gaps() -> None:
    clock = Clock()
    meter = FrontMeter(clock)
    stream = meter.stream()
    stream.accepted(7, "")
    sample = stream.sample()
    # Seconds since the last delta, tokens sent in all.
    for seconds, num_tokens in ((0.25, 2), (0.03, 3), (0.48, 7), (0.5, 7), (0.1, 8)):
        clock.now += seconds
        sample.sent(num_tokens)
    sample.over(10)
    found = reported(meter)
    histogram([0.25], found[catalogue.FIRST_TOKEN], catalogue.FIRST_TOKEN)
    # A delta without a token, of held text, does not end a gap.
    histogram([0.03, *[0.12] * 4, 0.6], found[catalogue.BETWEEN_TOKENS], catalogue.BETWEEN_TOKENS)
    assert found[catalogue.GENERATION_TOKENS] == [10]
    assert found[catalogue.PROMPT_TOKENS] == [7]


def test_a_request_is_measured_at_its_summary() -> None:
    clock = Clock()
    meter = FrontMeter(clock)
    stream = meter.stream()
    stream.accepted(7, "")
    clock.now += 3.0
    times = {"queue_seconds": 0.3, "prefill_seconds": 0.5, "decode_seconds": 2.0, "worker_changes": 4}
    stream.finished(summary(12, **times), [pb.FINISH_REASON_EOS, pb.FINISH_REASON_LENGTH])
    found = reported(meter)
    for metric, value in (
        (catalogue.LATENCY, 3.0), (catalogue.QUEUE_TIME, 0.3), (catalogue.PREFILL_TIME, 0.5),
        (catalogue.DECODE_TIME, 2.0), (catalogue.REQUEST_PROMPT, 7), (catalogue.REQUEST_OUTPUT, 12),
        (catalogue.PER_TOKEN, 2.0 * 2 / 10),
    ):  # fmt: skip
        histogram([value], found[metric], metric)
    assert dict(zip(catalogue.REASONS, found[catalogue.SUCCESSES], strict=True)) == {
        **dict.fromkeys(catalogue.REASONS, 0), "eos": 1, "length": 1,
    }  # fmt: skip
    assert [found[metric] for metric in (catalogue.DISCARDED, catalogue.RECOMPUTED, catalogue.CHANGES_SURVIVED)] == [
        [2], [30], [4],
    ]  # fmt: skip
    # One token has no gap.
    meter.stream().finished(summary(1), [pb.FINISH_REASON_EOS])
    assert sum(reported(meter)[catalogue.PER_TOKEN][:-1]) == 1


def codes(meter: FrontMeter) -> tuple[dict[str, float], dict[str, float]]:
    found = reported(meter)
    refused, failed = (
        {code: value for code, value in zip(catalogue.CODES, found[metric], strict=True) if value}
        for metric in (catalogue.REJECTIONS, catalogue.FAILURES)
    )
    return refused, failed


def test_refused_calls_and_failed_requests_differ() -> None:
    meter = FrontMeter(Clock())
    meter.rejected("UNAUTHENTICATED")
    meter.stream().refused("INVALID_ARGUMENT")
    # The caller left while its request was checked.
    meter.stream().refused("CANCELLED")
    meter.stream(is_resumed=True).refused("NOT_FOUND")
    for is_resumed, code in ((False, "UNAVAILABLE"), (False, "CANCELLED"), (True, "CANCELLED")):
        stream = meter.stream(is_resumed=is_resumed)
        stream.accepted(1, "")
        stream.refused(code)
    assert codes(meter) == ({"unauthenticated": 1, "invalid_argument": 1}, {"unavailable": 1, "cancelled": 2})


def test_a_resumed_stream_counts_what_it_sends() -> None:
    clock = Clock()
    meter = FrontMeter(clock)
    stream = meter.stream(is_resumed=True)
    stream.accepted(7, "acme")
    sample = stream.sample()
    sample.skip(10, num_received=8)
    clock.now += 0.24
    sample.sent(12)
    sample.over(12)
    stream.finished(summary(12, total_seconds=9.0), [pb.FINISH_REASON_EOS])
    found = reported(meter)
    assert (found[catalogue.PROMPT_TOKENS], found[catalogue.GENERATION_TOKENS]) == ([0], [4])
    histogram([0.12, 0.12], found[catalogue.BETWEEN_TOKENS], catalogue.BETWEEN_TOKENS)
    histogram([9.0], found[catalogue.LATENCY], catalogue.LATENCY)
    assert sum(found[catalogue.FIRST_TOKEN]) == 0


def run(meter: FrontMeter, tenant: str, prompt: int, output: int) -> StreamMeter:
    stream = meter.stream()
    stream.accepted(prompt, tenant)
    stream.sample().sent(output)
    return stream


def test_a_report_has_the_tenants_that_have_changed() -> None:
    meter = FrontMeter(Clock())
    run(meter, "a", 1, 2)
    run(meter, "b", 3, 4)
    run(meter, "", 5, 6)

    def named() -> list[tuple[str, int, int]]:
        return [(one.tenant, one.prompt_tokens, one.generation_tokens) for one in meter.report(0).tenants]

    assert named() == [("a", 1, 2), ("b", 3, 4)]
    assert named() == []
    run(meter, "b", 1, 1)
    assert named() == [("b", 4, 5)]
    # The last report may be lost.
    meter.connection_lost()
    assert named() == [("a", 1, 2), ("b", 4, 5)]


def test_all_tenants_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_meter, "_MAX_TENANTS", 3)
    meter, totals, names = FrontMeter(Clock()), FrontTotals(), {f"t-{number}" for number in range(8)}
    for round_ in range(1, 5):
        # The first three change again before each report.
        for name in sorted(names) if round_ == 1 else ("t-0", "t-1", "t-2"):
            run(meter, name, 1, 1)
        report = meter.report(0)
        assert len(report.tenants) == 3
        totals.take("f", report)
    assert totals.of_tenants(names).keys() == names
    for _ in range(2):
        totals.take("f", meter.report(0))
    assert totals.of_tenants(names) == {name: (4, 4) if name < "t-3" else (1, 1) for name in names}
    assert not meter.report(0).tenants


def total(totals: FrontTotals) -> float:
    [value] = cells_of(catalogue.PROMPT_TOKENS, totals.cells())
    return value


def test_reports_replace_each_other_and_outlive_their_process() -> None:
    totals, meters = FrontTotals(), [FrontMeter(Clock()) for _ in range(2)]
    for meter in meters:
        run(meter, "a", 10, 1)
    last = meters[0].report(64)
    totals.take("f-1", last)
    totals.take("f-2", meters[1].report(128))
    assert (total(totals), totals.backlog_bytes, totals.of_tenants({"a"})) == (20, 192, {"a": (20, 2)})
    # It comes again, from a new connection of the same process.
    totals.take("f-3", last)
    assert (total(totals), totals.of_tenants({"a"})) == (20, {"a": (20, 2)})
    totals.keep(["f-2"])
    assert (total(totals), totals.backlog_bytes) == (20, 128)
    assert totals.of_tenants(set()) == {}


def test_old_processes_become_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_meter, "_MAX_PROCESSES", 2)
    totals = FrontTotals()
    for number in count(1):
        meter = FrontMeter(Clock())
        run(meter, "a", 10, 1)
        totals.take(f"f-{number}", meter.report(0))
        assert (total(totals), totals.of_tenants({"a"})) == (10 * number, {"a": (10 * number, number)})
        assert len(totals._of_process) <= 3 and len(totals._of_tenant["a"]) <= 3
        if number == 6:
            return


def test_no_counter_goes_back_while_a_process_is_added_to_those_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is made between any two instructions shows at least what the page before it showed."""
    monkeypatch.setattr(core_meter, "_MAX_PROCESSES", 2)
    totals, shown = FrontTotals(), [0.0, 0.0]

    def look() -> None:
        seen = [total(totals), *(use[0] for use in totals.of_tenants({"a"}).values())]
        assert all(now >= before for now, before in zip(seen, shown, strict=False))
        shown[: len(seen)] = seen

    for number in range(6):
        meter = FrontMeter(Clock())
        run(meter, "a", 10, 1)
        report = meter.report(0)
        at_every_instruction(lambda report=report, number=number: totals.take(f"f-{number}", report), look, core_meter)
    assert shown == [60.0, 60.0]


@pytest.mark.parametrize("values", [b"", bytes(8 * catalogue.NUM_CELLS - 8), bytes(8 * catalogue.NUM_CELLS + 1)])
def test_a_report_of_another_size_is_refused(values: bytes) -> None:
    with pytest.raises(WireError, match=f"{len(values)} bytes instead of {8 * catalogue.NUM_CELLS}"):
        FrontTotals().take("f-1", frontend_pb2.MetricsReport(values=values))


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_report_with_impossible_numbers_is_refused(value: float) -> None:
    cells = np.zeros(catalogue.NUM_CELLS)
    cells[3] = value
    totals = FrontTotals()
    with pytest.raises(WireError, match="negative or not finite"):
        totals.take("f-1", frontend_pb2.MetricsReport(values=cells.tobytes()))
    assert total(totals) == 0


def test_every_metric_of_front_ends_is_measured() -> None:
    assert {metric.kind for metric in catalogue.FRONTEND_METRICS} == {Kind.COUNTER, Kind.HISTOGRAM}
    assert len(FrontMeter(Clock()).report(0).values) == 8 * catalogue.NUM_CELLS
