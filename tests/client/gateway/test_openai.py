"""OpenAI's own Python client against the gateway: answers, streams, tools, errors."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from tandem.v1 import chat_pb2, inference_pb2

from tests.client import fake_service as fake
from tests.client.gateway.conftest import Fronted
from tests.client.gateway.told_service import as_asked, call_piece, thoughts_and_calls, two_scored, warned_and_cut

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}


def test_models(fronted: Fronted) -> None:
    [model] = fronted.client.models.list().data
    assert (model.id, model.object, model.owned_by) == (fronted.service.model, "model", "tandem")
    assert model.model_dump()["max_model_len"] == 1024
    assert fronted.client.models.retrieve(fronted.service.model).id == model.id
    with pytest.raises(openai.NotFoundError) as caught:
        fronted.client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion(fronted: Fronted) -> None:
    raw = fronted.client.completions.with_raw_response.create(
        model=fronted.service.model, prompt="Hello", max_tokens=3, temperature=0.5, seed=-1, stop=["x", "yz"],
        logit_bias={"5": -1}, user="someone", extra_headers={"x-request-id": "mine", "traceparent": "00-1-1-1"},
    )  # fmt: skip
    answer = raw.parse()
    assert answer.object == "text_completion" and answer.model == fronted.service.model
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("Réturn", "length", 0)
    assert answer.usage is not None and answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    sent = fronted.service.generated
    assert sent.text == "Hello" and sent.stop.max_new_tokens == 3 and list(sent.stop.stop_strings) == ["x", "yz"]
    assert sent.sampling.seed == 2**64 - 1 and dict(sent.sampling.logit_bias) == {5: -1.0}
    assert sent.request_id.startswith("mine-") and raw.headers["x-request-id"] == sent.request_id
    assert sent.cache.salt.startswith("user-") and "someone" not in sent.cache.salt
    assert fronted.service.metadata("authorization") == ["Bearer tandem_key"]
    assert fronted.service.metadata("traceparent") == ["00-1-1-1"]


def test_prompts_and_samples_are_choices_in_order(fronted: Fronted) -> None:
    fronted.service.behaviour = as_asked
    answer = fronted.client.completions.create(model="", prompt=[[1, 2], [3]], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "sample 0"), (1, "sample 1"), (2, "sample 0"), (3, "sample 1"),
    ]  # fmt: skip
    requests = [each for each in fronted.service.requests if isinstance(each, inference_pb2.GenerateRequest)]
    assert sorted(list(each.token_ids.ids) for each in requests) == [[1, 2], [3]]
    assert len({each.request_id for each in requests}) == 2
    stream = fronted.client.completions.create(model="", prompt=["a", "b"], n=2, stream=True)
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == ["sample 0", "sample 1"] * 2


def test_echo_and_logprobs(fronted: Fronted) -> None:
    fronted.service.behaviour = two_scored
    answer = fronted.client.completions.create(model="", prompt=[9, 8, 7, 6], n=2, logprobs=1, echo=True)
    first, second = answer.choices
    assert first.text == "\t\x08\x07\x06Réturn" and second.text == "\t\x08\x07\x06en"
    found = first.logprobs
    assert found is not None
    assert found.tokens == ["<9>", "<8>", "<7>", "<6>", "<5>", "<6>"]
    assert found.token_logprobs == [None, -1.0, -2.0, -3.0, -0.5, -0.75]
    # The output begins where the prompt's text ends, with any tokens.
    assert found.text_offset == [0, 3, 6, 9, 4, 7]
    assert found.top_logprobs is not None and found.top_logprobs[0] is None
    assert found.top_logprobs[1] == {"<40>": -1.25, "<8>": -1.0}
    assert second.finish_reason == "stop" and first.finish_reason == "length"
    sent = fronted.service.generated
    assert sent.output.logprobs == 1 and sent.output.prompt_logprobs_start == 0 and sent.output.want_token_ids
    # Nothing is made beyond the prompt: the service's one token is not shown.
    answer = fronted.client.completions.create(model="", prompt=[9, 8, 7, 6], n=2, logprobs=1, echo=True, max_tokens=0)
    assert answer.choices[0].text == "\t\x08\x07\x06" and fronted.service.generated.stop.max_new_tokens == 1
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -1.0, -2.0, -3.0]
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    # The second one's hidden token ended it.
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


def test_a_stream_has_the_text_of_the_whole_answer_with_logprobs_and_echo(fronted: Fronted) -> None:
    fronted.service.behaviour = two_scored
    ask: dict[str, Any] = {"model": "", "prompt": [9, 8, 7, 6], "n": 2, "logprobs": 1, "echo": True}
    whole = fronted.client.completions.create(**ask)
    texts, tokens, offsets = ["", ""], [[], []], [[], []]
    for chunk in fronted.client.completions.create(**ask, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs is not None]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs is not None]


def test_a_chat_with_reasoning_and_tools(fronted: Fronted) -> None:
    fronted.service.behaviour = thoughts_and_calls
    answer = fronted.client.chat.completions.create(
        model=fronted.service.model, messages=MESSAGES, tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=True, max_completion_tokens=50, extra_body={"chat_template_kwargs": {"deep": True}},
    )  # fmt: skip
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.model_dump()["reasoning_content"] == "hmm."
    calls = choice.message.tool_calls
    assert calls is not None
    found = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert found == [("abcdefgh1", "weather", {"city": "Paris"}), ("abcdefgh2", "clock", {})]
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    chat = fronted.service.generated.chat
    assert [json.loads(tool) for tool in chat.tools_json] == [WEATHER]
    assert chat.tool_choice.mode == chat_pb2.TOOL_CHOICE_MODE_REQUIRED and chat.parallel_tool_calls
    assert json.loads(chat.template_args_json) == {"deep": True}
    assert fronted.service.generated.stop.max_new_tokens == 50


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_warning_is_a_header_and_a_call_that_is_cut_is_incomplete(fronted: Fronted, is_stream: bool) -> None:
    fronted.service.behaviour = warned_and_cut
    raw = fronted.client.chat.completions.with_raw_response
    ask: dict[str, Any] = {"model": "", "messages": MESSAGES, "tools": [WEATHER], "stream": is_stream}
    answer = raw.create(**ask)
    assert answer.headers["x-tandem-warning"] == "the schema of tool 'weather'"
    if is_stream:
        chunks = [chunk.choices[0] for chunk in answer.parse()]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        reason, content = chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)
    else:
        [choice] = answer.parse().choices
        calls, reason, content = choice.message.tool_calls or [], choice.finish_reason, choice.message.content or ""
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", '{"city": "Par')]
    assert (reason, content) == ("length", "")
    fronted.service.behaviour = thoughts_and_calls
    assert "x-tandem-warning" not in raw.create(**ask).headers


def test_equal_beginnings_have_equal_affinity(fronted: Fronted) -> None:
    seen: list[str | bytes] = []
    for prompt in ("a", "a", "b"):
        fronted.client.completions.create(model="", prompt=prompt)
        seen += fronted.service.metadata("tandem-affinity")
    assert seen[0] == seen[1] != seen[2] and len(seen) == 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_services_that_a_proxy_names_are_a_header(fronted: Fronted, is_stream: bool) -> None:
    def named(request: inference_pb2.GenerateRequest, ending: fake.Ending) -> Iterator[inference_pb2.GenerateResponse]:
        ending.context.send_initial_metadata((("tandem-cell", request.text[0]),))
        return fake.one_completion(request, ending)

    raw = fronted.client.completions.with_raw_response
    fronted.service.behaviour = named
    answer = raw.create(model="", prompt=["a1", "b1", "a2"], stream=is_stream)
    assert answer.headers["x-tandem-service"] == "a, b"
    fronted.service.behaviour = fake.one_completion
    assert "x-tandem-service" not in raw.create(model="", prompt="a1", stream=is_stream).headers


def test_openais_helper_collects_a_chat_from_its_chunks(fronted: Fronted) -> None:
    fronted.service.behaviour = thoughts_and_calls
    with fronted.client.chat.completions.stream(
        model="", messages=MESSAGES, tools=[WEATHER], stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert "content.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
    assert answer.usage is not None and answer.usage.prompt_tokens == 7


def test_the_old_form_of_calls(fronted: Fronted) -> None:
    halves = (call_piece(0, '{"city": "Par', "abcdefgh1", "weather"), call_piece(0, 'is"}'))
    fronted.service.behaviour = fake.sending(
        *halves, fake.finished(9, inference_pb2.FINISH_REASON_EOS), fake.summary(1)
    )
    ask: dict[str, Any] = {
        "model": "", "messages": MESSAGES, "functions": [WEATHER["function"]], "function_call": {"name": "weather"},
    }  # fmt: skip
    [choice] = fronted.client.chat.completions.create(**ask).choices
    call = choice.message.function_call
    assert call is not None and (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("function_call", None, None)
    chat = fronted.service.generated.chat
    assert [json.loads(tool) for tool in chat.tools_json] == [WEATHER] and chat.tool_choice.name == "weather"
    assert chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    chunks = [chunk.choices[0] for chunk in fronted.client.chat.completions.create(**ask, stream=True)]
    pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
    assert [(piece.name, piece.arguments) for piece in pieces] == [("weather", '{"city": "Par'), (None, 'is"}')]
    assert chunks[-1].finish_reason == "function_call"
    assert all(chunk.delta.tool_calls is None for chunk in chunks)
    # Its answer and the function's go back as they are.
    talk = [*MESSAGES, choice.message, {"role": "function", "name": "weather", "content": "5"}]
    fronted.service.behaviour = fake.one_completion
    [choice] = fronted.client.chat.completions.create(**{**ask, "messages": talk, "function_call": "auto"}).choices
    assert (choice.finish_reason, choice.message.function_call) == ("length", None)
    said = fronted.service.generated.chat.messages
    assert [message.role for message in said] == ["user", "assistant", "tool"]
    assert said[1].tool_calls[0].id == said[2].tool_call_id != ""
    # A call that the service sends beside the first has no place.
    fronted.service.behaviour = thoughts_and_calls
    [choice] = fronted.client.chat.completions.create(**ask).choices
    assert choice.message.function_call is not None and choice.message.function_call.name == "weather"
    chunks = fronted.client.chat.completions.create(**ask, stream=True)
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join(each.arguments or "" for each in deltas if each) == '{"city": "Paris"}'


def test_the_chunks_of_a_chat(fronted: Fronted) -> None:
    fronted.service.behaviour = thoughts_and_calls
    ask: dict[str, Any] = {"model": "", "messages": MESSAGES, "stream_options": {"include_usage": True}}
    chunks = list(fronted.client.chat.completions.create(**ask, stream=True))
    first, *_, last, usage = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert last.choices[0].finish_reason == "tool_calls" and last.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 9
    thoughts = [chunk.choices[0].delta.model_dump().get("reasoning_content") for chunk in chunks[:-1]]
    assert [each for each in thoughts if each] == ["hm", "m."]
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_logprobs_of_a_chat(fronted: Fronted) -> None:
    fronted.service.behaviour = two_scored
    ask: dict[str, Any] = {"model": "", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1}
    found = fronted.client.chat.completions.create(**ask).choices[1].logprobs
    assert found is not None and found.content is not None
    assert [(entry.token, entry.logprob) for entry in found.content] == [("<8>", -1.5), ("<9>", -2.5)]
    assert [top.token for top in found.content[0].top_logprobs] == ["<40>"]
    assert found.content[0].bytes == list(b"<8>")
    streamed = list[str]()
    for chunk in fronted.client.chat.completions.create(**ask, stream=True):
        logprobs = chunk.choices[0].logprobs
        if chunk.choices[0].index == 1 and logprobs is not None and logprobs.content is not None:
            streamed += [entry.token for entry in logprobs.content]
    assert streamed == ["<8>", "<9>"]


def test_usage_in_each_chunk(fronted: Fronted) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(fronted.client.completions.create(model="", prompt="a", stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == [1, 3, 3, 3] and len(chunks) == 4


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "json_schema", '{"type":"object"}',
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
        ({"extra_body": {"guided_grammar": "start: A"}}, "lark", "start: A"),
    ],
)  # fmt: skip
def test_constraints(fronted: Fronted, given: dict[str, Any], kind: str, value: str | None) -> None:
    fronted.client.chat.completions.create(model="", messages=MESSAGES, **given)
    constraint = fronted.service.generated.constraint
    assert constraint.WhichOneof("kind") == kind
    assert value is None or getattr(constraint, kind) == value


@pytest.mark.parametrize(
    ("code", "detail", "error", "status", "field", "name"),
    [
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            fake.bad_request("sampling.num_samples", "sampling.num_samples is 99; the limit is 16"),
            openai.BadRequestError, 400, "n", None,
        ),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            fake.bad_request("prompt", "prompt has 3000 tokens; the limit is 511"),
            openai.BadRequestError, 400, "messages", "context_length_exceeded",
        ),
        (grpc.StatusCode.NOT_FOUND, None, openai.NotFoundError, 404, None, "model_not_found"),
        (grpc.StatusCode.UNAUTHENTICATED, None, openai.AuthenticationError, 401, None, "invalid_api_key"),
        (grpc.StatusCode.PERMISSION_DENIED, None, openai.PermissionDeniedError, 403, None, "permission_denied"),
        (grpc.StatusCode.ALREADY_EXISTS, None, openai.ConflictError, 409, None, "request_id_taken"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, fake.retry_info(2.5), openai.RateLimitError, 429, None, "queue_full"),
        (
            grpc.StatusCode.UNAVAILABLE, fake.retry_info(0.5),
            openai.InternalServerError, 503, None, "service_unavailable",
        ),
        (grpc.StatusCode.DEADLINE_EXCEEDED, fake.retry_info(1), openai.APIStatusError, 408, None, "deadline_exceeded"),
        (
            grpc.StatusCode.FAILED_PRECONDITION, error_details_pb2.RequestInfo(request_id="x"),
            openai.BadRequestError, 400, None, "request_quarantined",
        ),
        (grpc.StatusCode.INTERNAL, None, openai.InternalServerError, 500, None, "internal_error"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors(
    fronted: Fronted, code: grpc.StatusCode, detail: Any, error: type[openai.APIStatusError], status: int,
    field: str | None, name: str | None, stream: bool,
) -> None:  # fmt: skip
    words = detail.field_violations[0].description if isinstance(detail, error_details_pb2.BadRequest) else "so it is"
    fronted.service.behaviour = fake.refusing(code, words, *([] if detail is None else [detail]))
    with pytest.raises(error) as caught:
        fronted.client.chat.completions.create(model="", messages=MESSAGES, stream=stream)
    found = caught.value
    assert (found.status_code, found.param, found.code) == (status, field, name)
    assert "sampling.num_samples" not in found.message
    assert ("maximum context length is" in found.message) == (name == "context_length_exceeded")
    headers = found.response.headers
    if isinstance(detail, error_details_pb2.RetryInfo):
        seconds = detail.retry_delay.ToTimedelta().total_seconds()
        assert float(headers["retry-after-ms"]) == seconds * 1000 and int(headers["retry-after"]) >= seconds
    assert headers.get("x-should-retry") == ("false" if name == "request_quarantined" else None)
    assert (headers.get("www-authenticate") == "Bearer") == (status == 401)


broken = fake.sending(fake.delta(0, [5], "R"), fake.fails(grpc.StatusCode.INTERNAL, "the step broke"))


def test_an_error_after_the_first_token(fronted: Fronted) -> None:
    fronted.service.behaviour = broken
    stream = iter(fronted.client.completions.create(model="", prompt="a", stream=True))
    assert next(stream).choices[0].text == "R"
    with pytest.raises(openai.APIError, match="the step broke"):
        next(stream)
    # The same request must not run again by itself.
    with pytest.raises(openai.InternalServerError) as caught:
        fronted.client.with_options(max_retries=5).completions.create(model="", prompt="a")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(fronted.service.endings) == 2


def test_leaving_a_stream_and_a_timeout_of_the_client_cancel_the_call(fronted: Fronted) -> None:
    fronted.service.behaviour = fake.endless
    stream = fronted.client.completions.create(model="", prompt="a", stream=True)
    assert next(iter(stream)).choices[0].text == "R"
    stream.close()
    assert fronted.service.endings[-1].wait()
    with pytest.raises(openai.APITimeoutError):
        fronted.client.with_options(timeout=0.5).completions.create(model="", prompt="a")
    assert fronted.service.endings[-1].wait()


async def test_the_asynchronous_client(fronted: Fronted) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fronted.url}/v1", api_key="k") as client:

        async def one() -> str:
            stream = await client.completions.create(model="", prompt="a", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*(one() for _ in range(8))) == ["Réturn"] * 8


def test_whole_unicode_passes(fronted: Fronted) -> None:
    text = "".join(map(chr, [*range(32, 0x300), 0x1F600, 0x10FFFF, 0x2028, 0xFEFF]))

    fronted.service.behaviour = fake.sending(fake.delta(0, [5], text), fake.finished(1), fake.summary(1))
    stream = fronted.client.completions.create(model="", prompt=text, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    assert fronted.client.completions.create(model="", prompt=text).choices[0].text == text
