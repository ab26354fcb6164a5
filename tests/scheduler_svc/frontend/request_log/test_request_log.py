"""The line of each ended request: its fields, what it never has, and that a caller cannot forge it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import inference_pb2

from scheduler_svc.frontend.request_log import LINES_EACH, OTHER, REPORT_SECONDS, RefusalCounts
from tandem_contract.logs import Formatter
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, rest, service, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
SECRET_TEXT = "zebra-crossing"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The JSON lines of requests so far."""
    caplog.set_level(logging.DEBUG)

    def found() -> list[dict[str, Any]]:
        shown = [json.loads(Formatter("frontend", "json").format(record)) for record in caplog.records]
        return [line for line in shown if "outcome" in line]

    return found


async def newest(lines: Lines, count: int, **said: Any) -> dict[str, Any]:
    """The newest of so many lines, which says this."""
    await until(lambda: len(lines()) >= count)
    assert len(lines()) == count
    line = lines()[-1]
    assert {name: line.get(name) for name in said} == said
    return line


async def test_a_served_request(s: Service, lines: Lines) -> None:
    call = s.generate(metadata=TRACEPARENT, text=SECRET_TEXT, request_id="mine")
    submit = await s.core.admit()
    assert submit.traceparent == TRACEPARENT[0][1]
    usage = inference_pb2.Usage(output_tokens=2, cached_prompt_tokens=7, recomputed_tokens=5)
    timing = inference_pb2.Timing(
        queue_seconds=0.25, first_token_seconds=0.5, total_seconds=2.0, preemptions=3, worker_changes=1
    )
    await s.core.output(submit.stream, [65, 66], "LENGTH", usage=usage, timing=timing)
    await rest(call)
    line = await newest(lines, 1, process="frontend", level="INFO", message="request ended")
    assert line.pop("call_seconds") > 0
    assert {name: line[name] for name in list(line)[5:]} == {
        "request_id": "mine",
        "outcome": "length",
        "method": "Generate",
        "model": "toy",
        "samples": 1,
        "prompt_tokens": len(submit.prompt) // 4,
        "cached_tokens": 7,
        "output_tokens": 2,
        "recomputed_tokens": 5,
        "queue_seconds": 0.25,
        "first_token_seconds": 0.5,
        "total_seconds": 2.0,
        "preemptions": 3,
        "worker_changes": 1,
        "peer": "tcp",
        "trace_id": TRACE,
        "parent_id": PARENT,
    }


async def test_every_other_end_of_an_accepted_request(s: Service, lines: Lines) -> None:
    call, submit = await s.start_stream(request_id="failed")
    await s.core.output(submit.stream, [65])
    await s.core.fail(submit.stream, "INTERNAL", f"it said {SECRET_TEXT}")
    await fails(call, Code.INTERNAL)
    why = {"outcome": "INTERNAL", "reason": "internal"}
    await newest(lines, 1, level="WARNING", message="request ended", output_tokens=1, **why)
    call, submit = await s.start_stream(request_id="cancelled")
    await s.core.output(submit.stream, [65, 66])
    assert (await call.read()).WhichOneof("event") == "delta"
    await s.leave(call)
    line = await newest(lines, 2, outcome="CANCELLED", prompt_tokens=len(submit.prompt) // 4, output_tokens=2)
    assert "reason" not in line and "total_seconds" not in line
    call, submit = await s.start_stream(request_id="left", resume=inference_pb2.ResumeParams(linger_seconds=5))
    await s.leave(call)
    await newest(lines, 3, outcome="CANCELLED", reason="detached")
    call, submit = await s.start_stream(request_id="two", sampling={"num_samples": 2})
    await s.core.output(submit.stream, [65], "EOS")
    await s.core.output(submit.stream + 1, [66], "LENGTH")
    await rest(call)
    await newest(lines, 4, outcome="eos,length", samples=2, output_tokens=2)


async def test_a_refused_request_and_its_field_without_the_callers_values(s: Service, lines: Lines) -> None:
    bias = inference_pb2.SamplingParams(logit_bias={99_999: 1.0})
    await fails(s.generate(request_id="a", sampling=bias), Code.INVALID_ARGUMENT)
    why = {"outcome": "INVALID_ARGUMENT", "reason": "sampling.logit_bias"}
    line = await newest(lines, 1, request_id="a", message="request refused", **why)
    assert "99999" not in json.dumps(line)
    await fails(s.generate(model=SECRET_TEXT), Code.NOT_FOUND)
    await newest(lines, 2, outcome="NOT_FOUND")
    call = s.generate()
    submit = await s.core.refuse("QUEUE_FULL", SECRET_TEXT)
    await fails(call, Code.RESOURCE_EXHAUSTED)
    await newest(lines, 3, outcome="RESOURCE_EXHAUSTED", reason="queue_full", request_id=submit.request_id)
    assert SECRET_TEXT not in json.dumps(lines())


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_an_id_forges_no_line_or_field(tmp_path: Path, caplog: pytest.LogCaptureFixture, log_format: Any) -> None:
    caplog.set_level(logging.INFO)
    # Printable, so it is accepted; the second one is refused for its line end, and shown in the refusal's line.
    forged = [
        'x tenant=other outcome="length" \\',
        "x\n2026-11-22 02:12:58.026 core INFO forged",
        "\u2028é" + "y" * 400,
    ]
    async with service(tmp_path) as s:
        call, submit = await s.start_stream(request_id=forged[0])
        await s.ends(call, submit.stream)
        for name in forged[1:]:
            await fails(s.generate(request_id=name), Code.INVALID_ARGUMENT)
    shown = [Formatter("frontend", log_format).format(record) for record in caplog.records if hasattr(record, "fields")]
    assert len(shown) == 3
    for name, line in zip(forged, shown, strict=True):
        assert line.isascii() and "\n" not in line and len(line) < 1000
        if log_format == "json":
            assert json.loads(line)["request_id"] == name[:128] and "tenant" not in json.loads(line)
        else:
            assert f" request_id={json.dumps(name[:128])} " in line
            assert " tenant=" not in line.replace(json.dumps(name[:128]), "")


async def test_a_flood_of_refusals_gets_few_lines_and_their_number(s: Service, lines: Lines) -> None:
    for _ in range(LINES_EACH + 20):
        await fails(s.generate(model="other"), Code.NOT_FOUND)
    await until(lambda: len(lines()) >= LINES_EACH)
    s.front_end._request_log.report(float("inf"))
    *refused, last = lines()
    assert {line["message"] for line in refused} == {"request refused"} and len(refused) == LINES_EACH
    assert (last["message"], last["outcome"], last["count"]) == ("more requests refused", "NOT_FOUND", 20)


@pytest.mark.parametrize("mode", ["off", "address"])
async def test_lines_can_be_turned_off_or_have_the_address(tmp_path: Path, lines: Lines, mode: str) -> None:
    async with service(tmp_path, log_requests=mode) as s:
        call, submit = await s.start_stream()
        await s.ends(call, submit.stream)
        await fails(s.generate(model="other"), Code.NOT_FOUND)
    found = lines()
    if mode == "off":
        assert found == []
    else:
        assert len(found) == 2 and all(line["address"].startswith("ipv4:127.0.0.1:") for line in found)


FULL, WRONG = ("RESOURCE_EXHAUSTED", "queue_full"), ("INVALID_ARGUMENT", "prompt")


def test_the_first_refusals_of_each_kind_get_a_line_and_the_others_are_counted() -> None:
    counts = RefusalCounts()
    assert list(counts.due(100.0)) == []
    assert sum(counts.add(FULL) for _ in range(5000)) == LINES_EACH
    assert counts.add(WRONG)
    assert list(counts.due(100.0 + REPORT_SECONDS - 0.1)) == []
    assert list(counts.due(100.0 + REPORT_SECONDS)) == [(FULL, 5000 - LINES_EACH)]
    assert counts.add(FULL)
    assert list(counts.due(100.0 + 2 * REPORT_SECONDS)) == []


def test_kinds_beyond_a_number_share_one_count() -> None:
    counts = RefusalCounts()
    list(counts.due(0.0))
    lines = sum(counts.add(("INVALID_ARGUMENT", f"field {idx}")) for idx in range(100_000))
    assert lines <= 64 + LINES_EACH
    [(kind, count)] = counts.due(REPORT_SECONDS)
    assert (kind, count) == (OTHER, 100_000 - lines)
