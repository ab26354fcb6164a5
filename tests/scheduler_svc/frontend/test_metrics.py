"""What a front end measures of real calls, with a fake core, and the reports that it sends."""

import pytest
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend import server
from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.catalogue import Metric
from scheduler_svc.metrics.core_meter import FrontTotals
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, rest, served, until
from tests.scheduler_svc.frontend.test_resume import accepted_stream, resume, resumed
from tests.scheduler_svc.frontend.tokenizers_for_tests import spell
from tests.scheduler_svc.metrics.test_front_meter import codes, reported


@pytest.fixture(autouse=True)
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake core expects the messages of requests only."""
    monkeypatch.setattr(server, "SWEEP_SECONDS", 1000.0)


def measured(s: Service) -> dict[Metric, list[float]]:
    return reported(s.front_end._meter)


def number_of(found: dict[Metric, list[float]], metric: Metric) -> float:
    """The number of values in a histogram, or a count."""
    return sum(found[metric][:-1]) if metric.buckets else sum(found[metric])


@served(measures=True)
async def test_the_tokens_are_those_that_callers_get(s: Service) -> None:
    stop = pb.StopParams(stop_strings=["stop"])
    call, submit = await s.start_stream(stop=stop, output=pb.OutputParams(want_token_ids=False))
    # Held text, part of a character, then tokens after the stop string.
    for text in (b"ab", b" st", b"ill", b"\xc3", b"\xa9", b" stop and more"):
        await s.core.output(submit.stream, spell(text))
    finish = await s.core.expect("finish")
    usage = pb.Usage(prompt_tokens=1, output_tokens=finish.output_tokens, discarded_tokens=9, recomputed_tokens=4)
    timing = pb.Timing(total_seconds=2.0, decode_seconds=1.5, queue_seconds=0.2, prefill_seconds=0.3, worker_changes=2)
    await s.core.output(submit.stream, [], "STOP_STRING", usage=usage, timing=timing)
    summary = (await rest(call))[-1][1]
    found = measured(s)
    assert summary.usage.output_tokens == finish.output_tokens == len("ab still") + 2 + len(" stop")
    assert number_of(found, catalogue.GENERATION_TOKENS) == summary.usage.output_tokens
    assert number_of(found, catalogue.PROMPT_TOKENS) == 1
    assert found[catalogue.REQUEST_OUTPUT][-1] == summary.usage.output_tokens
    assert found[catalogue.DISCARDED] == [summary.usage.discarded_tokens]
    assert (found[catalogue.RECOMPUTED], found[catalogue.CHANGES_SURVIVED]) == ([4], [2])
    assert number_of(found, catalogue.FIRST_TOKEN) == number_of(found, catalogue.LATENCY) == 1
    assert found[catalogue.SUCCESSES][catalogue.REASONS.index("stop_string")] == 1
    assert codes(s.front_end._meter) == ({}, {})


@served(measures=True)
async def test_each_sample_has_gaps_and_the_request_one_first_token(s: Service) -> None:
    call, submit = await s.start_stream(sampling=pb.SamplingParams(num_samples=2))
    for sample in range(2):
        await s.core.output(submit.stream + sample, spell(b"abc"))
        assert (await call.read()).delta.text == "abc"
    for sample in range(2):
        await s.core.output(submit.stream + sample, spell(b"d"), "LENGTH")
    await rest(call)
    found = measured(s)
    assert number_of(found, catalogue.FIRST_TOKEN) == 1
    assert number_of(found, catalogue.BETWEEN_TOKENS) == 2
    assert number_of(found, catalogue.GENERATION_TOKENS) == 8
    assert number_of(found, catalogue.SUCCESSES) == 2


@served(measures=True)
async def test_refusals_and_failures_are_counted_by_code(s: Service) -> None:
    await fails(s.generate(sampling=pb.SamplingParams(temperature=-1)), Code.INVALID_ARGUMENT)
    call = s.generate()
    await s.core.refuse("DUPLICATE")
    await fails(call, Code.ALREADY_EXISTS)
    call, submit = await s.start_stream()
    await s.core.fail(submit.stream, "INTERNAL", "not finite")
    await fails(call, Code.INTERNAL)
    call, submit = await s.start_stream()
    await s.leave(call)
    await s.core.send(core_status=frontend_pb2.CoreStatus(queue_full="full"))
    readiness = s.front_end._readiness
    await until(lambda: readiness.requests._closed)
    await fails(s.generate(), Code.RESOURCE_EXHAUSTED)
    await until(lambda: len(codes(s.front_end._meter)[1]) == 2)
    assert codes(s.front_end._meter) == (
        {"invalid_argument": 1, "already_exists": 1, "resource_exhausted": 1},
        {"internal": 1, "cancelled": 1},
    )
    # Other methods are not admissions.
    await fails(s.inference.Tokenize(pb.TokenizeRequest(model="other")), Code.NOT_FOUND)
    assert sum(codes(s.front_end._meter)[0].values()) == 3


@served(measures=True)
async def test_a_resumed_stream_counts_the_tokens_that_it_sends(s: Service) -> None:
    call, submit, accepted = await accepted_stream(s)
    await s.core.output(submit.stream, spell(b"abcd"))
    assert (await call.read()).delta.text == "abcd"
    await s.leave(call)
    again = resume(s, accepted, (3, 3))
    await resumed(s.core, submit.description, (spell(b"abcdef"), ""))
    assert (await again.read()).accepted.request_id == accepted.request_id
    assert (await again.read()).delta.text == "def"
    [stream] = s.core.num_sent.keys() - {submit.stream}
    await s.core.output(stream, spell(b"gh"), "LENGTH")
    await rest(again)
    found = measured(s)
    # The first stream sent four tokens; the second one the three after the caller's three, and two more.
    assert number_of(found, catalogue.GENERATION_TOKENS) == 4 + 3 + 2
    assert number_of(found, catalogue.PROMPT_TOKENS) == accepted.prompt_tokens
    assert number_of(found, catalogue.FIRST_TOKEN) == 1
    assert found[catalogue.LATENCY][-1] == 2.0
    assert codes(s.front_end._meter) == ({}, {"cancelled": 1})


@served((server, "SWEEP_SECONDS", 0.2), measures=True)
async def test_reports_come_about_once_a_second_and_at_the_end(s: Service) -> None:
    totals, numbers = FrontTotals(), set[int]()
    for _ in range(3):
        report = await s.core.expect("metrics")
        totals.take("f", report)
        numbers.add(report.process)
    assert len(numbers) == 1 and totals.backlog_bytes == 0
    s.front_end.stop()
    while not await s.core.is_silent(0.5):
        await s.core.expect("metrics")


@served((server, "SWEEP_SECONDS", 0.05))
async def test_without_a_page_nothing_is_measured(s: Service) -> None:
    call, submit = await s.start_stream()
    assert s.front_end._meter is None
    await s.core.output(submit.stream, spell(b"ab"), "LENGTH")
    await rest(call)
    assert await s.core.is_silent(0.3)
