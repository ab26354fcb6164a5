"""Tokenize, Detokenize and ControlService, with a fake core that each test controls."""

from pathlib import Path

import pytest
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend import control
from scheduler_svc.frontend.text import tokenizer
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, model_state, served, service
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, EOS, as_json, byte_level, spell, with_special_tokens

EOS_ID = byte_level().token_to_id(EOS)


async def test_detokenize_reverses_tokenize(s: Service) -> None:
    text = "the é€😀 stop\0"
    ids = (await s.inference.Tokenize(pb.TokenizeRequest(text=text))).token_ids
    assert list(ids) == byte_level().encode(text).ids
    assert (await s.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == text
    request = pb.DetokenizeRequest(token_ids=[65, EOS_ID])
    assert (await s.inference.Detokenize(request)).text == "A"
    request.skip_special_tokens = False
    assert (await s.inference.Detokenize(request)).text == f"A{EOS}"


@pytest.mark.parametrize("adds", [None, True, False])
async def test_special_tokens_of_a_text_are_added_if_wanted(tmp_path: Path, adds: bool | None) -> None:
    begun = with_special_tokens(f"{BOS} $A")
    state = model_state()
    state.tokenizer_json = as_json(begun)
    async with service(tmp_path, state=state) as s:
        bos = begun.token_to_id(BOS)
        for text in ("hi", f"{BOS}hi"):
            request = pb.TokenizeRequest(text=text, add_special_tokens=adds)
            ids = list((await s.inference.Tokenize(request)).token_ids)
            assert ids == [*([] if adds is False and text == "hi" else [bos]), *b"hi"]
        # Generate has the same prompt.
        call = s.generate(text="hi", add_special_tokens=adds)
        submit = await s.core.admit()
        expected = [*([] if adds is False else [bos]), *b"hi"]
        assert submit.prompt == b"".join(each.to_bytes(4, "little") for each in expected)
        call.cancel()


@served((tokenizer, "INLINE_CHARS", 10), (tokenizer, "INLINE_TOKENS", 10))
async def test_long_texts_are_tokenized_in_threads(s: Service) -> None:
    text = "a" * 400
    ids = (await s.inference.Tokenize(pb.TokenizeRequest(text=text))).token_ids
    assert list(ids) == spell(text.encode())
    assert (await s.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == text
    assert s.front_end._readiness.model().tokenizer.threads.gate.waiting.num_taken == 0


@served((tokenizer, "INLINE_CHARS", 10), (tokenizer, "MAX_WAITING_TEXTS", 0))
async def test_long_texts_above_the_limit_are_refused(s: Service) -> None:
    s.front_end._readiness.model().tokenizer.threads.gate.inside.add("", tokenizer.NUM_THREADS)
    await fails(s.inference.Tokenize(pb.TokenizeRequest(text="a" * 11)), Code.RESOURCE_EXHAUSTED, retry=0.5)
    await s.inference.Tokenize(pb.TokenizeRequest(text="a" * 10))


@pytest.mark.parametrize(
    ("length", "at_once", "num_parts", "said"),
    [
        (2500, 500, 2, "and the first 1000 are about 1000 tokens"),
        (2500, 2499, 1, "and the first 2499 are 2499 tokens"),
        (2500, 2500, 1, "which are 2500 tokens"),
        (2500, 65_536, 1, "which are 2500 tokens"),
        (1199, 600, 2, "which are about 1199 tokens"),
    ],
)
@served((tokenizer, "LIKELY_CHARS_PER_TOKEN", 2))
async def test_a_text_that_is_much_too_long_is_refused_after_a_part_of_it(
    s: Service, monkeypatch: pytest.MonkeyPatch, length: int, at_once: int, num_parts: int, said: str
) -> None:
    """The model has 512 tokens, and a text of 2,560 characters may be that short."""
    monkeypatch.setattr(tokenizer, "SLICE_CHARS", at_once)
    counted: list[int] = []
    count = tokenizer.Tokenizer._count
    monkeypatch.setattr(tokenizer.Tokenizer, "_count", lambda own, text: counted.append(len(text)) or count(own, text))
    monkeypatch.setattr(tokenizer.Tokenizer, "_encode", lambda own, text: pytest.fail("all of it"))
    text = "x" * length
    for call in (s.inference.Tokenize(pb.TokenizeRequest(text=text)), s.generate(text=text)):
        await fails(call, Code.INVALID_ARGUMENT, f"text has {length} characters, {said}; the limit is 512")
    assert len(counted) == 2 * num_parts


UNKNOWN = b"\xc0\x3e\x05"  # field 1000
GetLoadRequest = control_pb2.GetLoadRequest
# The method, its request, and the field that is refused.
BAD = [
    ("Tokenize", pb.TokenizeRequest(), "text"),
    ("Detokenize", pb.DetokenizeRequest(), "token_ids"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[2**31]), "token_ids[0]"),
    ("Abort", control_pb2.AbortRequest(), "request_ids"),
    ("Abort", control_pb2.AbortRequest(request_ids=["a", ""]), "request_ids[1]"),
    ("Abort", control_pb2.AbortRequest(request_ids=["\n"]), "request_ids[0]"),
    ("ListRequests", control_pb2.ListRequestsRequest(page_token="a"), "page_token"),
    ("ListRequests", control_pb2.ListRequestsRequest(page_token="é"), "page_token"),
    ("ListRequests", control_pb2.ListRequestsRequest(states=[4]), "states[0]"),
    ("ListRequests", control_pb2.ListRequestsRequest(states=[1, 0]), "states[1]"),
    ("ClearQuarantine", control_pb2.ClearQuarantineRequest(keys=["a"]), "keys[0]"),
    ("Tokenize", pb.TokenizeRequest.FromString(UNKNOWN), "TokenizeRequest.1000"),
    ("ListQuarantine", control_pb2.ListQuarantineRequest.FromString(UNKNOWN), "ListQuarantineRequest.1000"),
    ("GetLoad", GetLoadRequest.FromString(UNKNOWN), "GetLoadRequest.1000"),
    ("FlushCache", control_pb2.FlushCacheRequest.FromString(UNKNOWN), "FlushCacheRequest.1000"),
    ("GetModelInfo", control_pb2.GetModelInfoRequest.FromString(UNKNOWN), "GetModelInfoRequest.1000"),
]


async def test_refusals_of_bad_requests_name_the_field(s: Service) -> None:
    for method, request, field in BAD:
        stub = s.inference if hasattr(s.inference, method) else s.control
        await fails(getattr(stub, method)(request), Code.INVALID_ARGUMENT, field=field)
    await fails(s.inference.Tokenize(pb.TokenizeRequest(text="x", model="y")), Code.NOT_FOUND)
    await fails(s.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1], model="y")), Code.NOT_FOUND)
    assert await s.core.is_silent()


@served(state=model_state(has_tokenizer=False))
async def test_a_model_without_a_tokenizer_serves_token_ids_only(s: Service) -> None:
    assert not (await s.model_info()).has_tokenizer
    await fails(s.inference.Tokenize(pb.TokenizeRequest(text="a")), Code.INVALID_ARGUMENT)
    await fails(s.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1])), Code.INVALID_ARGUMENT)
    call, submit = await s.start_stream(token_ids=pb.TokenIds(ids=[1]))
    await s.core.output(submit.stream, [65])
    assert (await call.read()).delta == pb.Delta(token_ids=[65])


async def test_a_broken_tokenizer_counts_as_missing(tmp_path: Path) -> None:
    state = model_state()
    state.tokenizer_json = b"{"
    async with service(tmp_path, state=state) as s:
        assert not (await s.model_info()).has_tokenizer


async def test_model_info_adds_every_default_to_the_cores_info(s: Service) -> None:
    expected = model_state().info
    for name in ("presence_penalty", "frequency_penalty"):
        assert not expected.sampling_defaults.HasField(name)
        setattr(expected.sampling_defaults, name, 0.0)
    expected.chat_refusal = "chats need a chat template, and the served model has none"
    expected.sampling_defaults.num_samples, expected.sampling_defaults.typical_p = 1, 1.0
    info = await s.model_info()
    # sizes/test_table.py tests them.
    assert info.HasField("limits")
    info.ClearField("limits")
    assert info == expected


def aborts(*request_ids: str) -> control_pb2.AbortRequest:
    return control_pb2.AbortRequest(request_ids=request_ids)


NOT_FOUND = control_pb2.ABORT_OUTCOME_NOT_FOUND


async def test_abort_answers_in_the_callers_order(s: Service) -> None:
    reply = s.control.Abort(aborts("b", "a", "b"))
    abort = await s.core.expect("abort")
    assert list(abort.request_ids) == ["b", "a"]
    gone = control_pb2.AbortResult(request_id="b", outcome=control_pb2.ABORT_OUTCOME_ABORTED)
    none = control_pb2.AbortResult(request_id="a", outcome=NOT_FOUND)
    # A reply to an unknown query changes nothing.
    await s.core.send(abort_reply=frontend_pb2.AbortReply(query=abort.query + 1))
    await s.core.send(abort_reply=frontend_pb2.AbortReply(query=abort.query, results=[gone, none]))
    none.detail = "no waiting or running request has the id 'a'"
    assert list((await reply).results) == [gone, none, gone]


async def test_an_abort_names_what_was_looked_for(s: Service) -> None:
    reply = s.control.Abort(aborts("cmpl-A"))
    none = control_pb2.AbortResult(request_id="cmpl-A", outcome=NOT_FOUND)
    assert list((await s.core.answer("abort", "abort_reply", results=[none])).request_ids) == ["cmpl-A"]
    [result] = (await reply).results
    assert result.detail == "no waiting or running request has the id 'cmpl-A' or 'A' or 'cmpl-a' or 'a'"


async def test_the_pages_of_a_list_follow_each_other(s: Service) -> None:
    entry = control_pb2.RequestEntry(request_id="r", state=control_pb2.REQUEST_STATE_RUNNING, seconds_left=2.5)
    marks = [frontend_pb2.RequestsMark(number=number, epoch=1.5) for number in (7, 2**64 - 1)]
    token = ""
    for after, following in ((None, marks[0]), (marks[0], marks[1]), (marks[1], None)):
        request = control_pb2.ListRequestsRequest(page_token=token, id_prefix="cmpl-r", states=[1, 2])
        call = s.control.ListRequests(request)
        query = await s.core.answer("requests_query", "requests_reply", requests=[entry], next=following)
        assert (query.page_size, query.id_prefix, list(query.states)) == (100, "cmpl-r", [1, 2])
        assert (query.after if query.HasField("after") else None) == after
        answer = await call
        token = answer.next_page_token
        assert answer.requests == [control_pb2.RequestEntry(abort_id="r", **{f.name: v for f, v in entry.ListFields()})]
    assert token == ""
    stale = s.control.ListRequests(control_pb2.ListRequestsRequest(page_token="A" * 22 + "=="))
    await s.core.answer("requests_query", "requests_reply", is_stale=True)
    wanted = "page_token was made before the service started again; list from the beginning, without it"
    await fails(stale, Code.INVALID_ARGUMENT, wanted)


async def test_the_core_is_asked_for_one_page_at_a_time(s: Service) -> None:
    calls = [s.control.ListRequests(control_pb2.ListRequestsRequest()) for _ in range(17)]
    first = await s.core.expect("requests_query")
    refused = s.control.ListRequests(control_pb2.ListRequestsRequest())
    await fails(refused, Code.RESOURCE_EXHAUSTED, "16 ListRequests calls wait; the limit is 16")
    assert await s.core.is_silent()
    await s.core.send(requests_reply=frontend_pb2.RequestsReply(query=first.query))
    for _ in calls[1:]:
        await s.core.answer("requests_query", "requests_reply")
    assert [list((await call).requests) for call in calls] == [[]] * 17


async def test_concurrent_load_calls_share_one_query(s: Service) -> None:
    calls = [s.control.GetLoad(GetLoadRequest()) for _ in range(5)]
    query = await s.core.expect("load_query")
    # Waits until all five have arrived. If the first caller leaves, the others still get the reply.
    assert await s.core.is_silent()
    calls[0].cancel()
    load = control_pb2.GetLoadResponse(running=7)
    await s.core.send(load_reply=frontend_pb2.LoadReply(query=query.query, load=load))
    assert [(await call).running for call in calls[1:]] == [7, 7, 7, 7]
    again = s.control.GetLoad(GetLoadRequest())
    await s.core.answer("load_query", "load_reply", load={"running": 8})
    assert (await again).running == 8


@served(ready=False)
async def test_load_and_flushes_are_answered_before_a_worker_has_joined(s: Service) -> None:
    await s.core.expect("hello")
    load = s.control.GetLoad(GetLoadRequest())
    await s.core.answer("load_query", "load_reply", load={})
    assert (await load).workers == 0
    flush = s.control.FlushCache(control_pb2.FlushCacheRequest())
    await s.core.answer("flush_cache", "flush_reply", pages=12)
    assert (await flush).pages == 12


async def test_the_quarantine_is_listed_and_cleared(s: Service) -> None:
    entry = control_pb2.QuarantinedRequest(key="ab" * 32, request_id="r", cause="it killed its workers")
    listed = s.control.ListQuarantine(control_pb2.ListQuarantineRequest())
    await s.core.answer("quarantine_query", "quarantine_reply", requests=[entry])
    assert list((await listed).requests) == [entry]
    cleared = s.control.ClearQuarantine(control_pb2.ClearQuarantineRequest(keys=["ab" * 32]))
    asked = await s.core.answer("clear_quarantine", "quarantine_reply", removed=1)
    assert list(asked.keys) == ["ab" * 32]
    assert (await cleared).removed == 1


@served((control, "REPLY_SECONDS", 0.05))
async def test_queries_to_a_core_that_does_not_reply_are_unavailable(s: Service) -> None:
    for call in (
        s.control.GetLoad(GetLoadRequest()),
        s.control.FlushCache(control_pb2.FlushCacheRequest()),
        s.control.Abort(aborts("a")),
    ):
        await fails(call, Code.UNAVAILABLE, retry=1.0)
    assert s.front_end._queries._waiting == {}


@served((control, "MAX_QUERIES", 1))
async def test_queries_above_the_limit_are_refused(s: Service) -> None:
    first = s.control.Abort(aborts("a"))
    abort = await s.core.expect("abort")
    await fails(s.control.Abort(aborts("a")), Code.RESOURCE_EXHAUSTED)
    result = control_pb2.AbortResult(request_id="a", outcome=NOT_FOUND)
    await s.core.send(abort_reply=frontend_pb2.AbortReply(query=abort.query, results=[result]))
    await first
