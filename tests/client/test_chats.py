"""Conversations and constraints as keywords, and the parsed answers of both clients."""

import json
from typing import Any

import pytest
from tandem.v1 import chat_pb2, constraint_pb2, inference_pb2

from tandem_client import Client
from tandem_client.errors import InvalidArgument
from tandem_client.types import ChatMessage, FinishReason, SampleOffset, ToolCall
from tandem_client.wire.parts import IGNORED_IN_MESSAGES
from tandem_client.wire.request import generate_request
from tests.client import fake_service
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService, sending

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ada"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "content": "", "tool_call_id": "abcdefghi"},
]
SENT = [
    chat_pb2.ChatMessage(role="system", content=["Be brief."]),
    chat_pb2.ChatMessage(role="user", content=["a", "b"], name="Ada"),
    chat_pb2.ChatMessage(
        role="assistant", reasoning="hm",
        tool_calls=[chat_pb2.ToolCall(id="abcdefghi", name="weather", arguments_json='{"city": "Rom"}')],
    ),
    chat_pb2.ChatMessage(role="tool", content=[""], tool_call_id="abcdefghi"),
]  # fmt: skip
CALLS = (
    ToolCall(id="abcdefghi", name="weather", arguments='{"city": "Rom"}'),
    ToolCall(id="bcdefghij", name="time", arguments="{}"),
)
VALUES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content=("a", "b"), name="Ada"),
    ChatMessage(role="assistant", reasoning="hm", tool_calls=CALLS[:1]),
    ChatMessage(role="tool", content="", tool_call_id="abcdefghi"),
]


@pytest.mark.parametrize("chat", [TALK, VALUES, iter(TALK), [message.as_dict() for message in VALUES]])
def test_messages_are_dicts_or_values(chat: Any) -> None:
    request = generate_request(None, chat=chat)
    assert request.WhichOneof("prompt") == "chat"
    assert list(request.chat.messages) == SENT


def test_what_others_add_to_the_history_changes_nothing() -> None:
    added: dict[str, Any] = {name: {"any": ["thing"]} for name in IGNORED_IN_MESSAGES} | {"audio": None}
    function = {**CALL["function"], **added} if isinstance(CALL["function"], dict) else {}
    talk = [{**message, **added} for message in TALK]
    talk[1]["content"] = [{**part, **added} for part in TALK[1]["content"]]
    talk[2]["tool_calls"] = [{**CALL, **added, "function": function}]
    assert generate_request(None, chat=talk) == generate_request(None, chat=TALK)


@pytest.mark.parametrize(
    ("given", "sent"), [("{", "{"), ("null", "null"), (None, ""), ("", ""), ([], "[]"), ({"a": "é"}, '{"a": "é"}')]
)
def test_arguments_of_the_history_are_sent_as_they_are(given: object, sent: str) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    request = generate_request(None, chat=[{"role": "assistant", "tool_calls": [call]}])
    assert request.chat.messages[0].tool_calls[0].arguments_json == sent


def test_a_refusal_of_the_history_is_its_content() -> None:
    parts = [{"type": "refusal", "refusal": "no"}]
    for message in ({"refusal": "no"}, {"content": None, "refusal": "no"}, {"content": parts}):
        [made] = generate_request(None, chat=[{"role": "assistant", **message}]).chat.messages
        assert made.content == ["no"]


def test_every_option_of_a_chat_sets_its_field() -> None:
    chat = generate_request(
        None, chat=TALK[:1], tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
        template_args={"enable_thinking": False, "name": "Zoë"}, continue_final_message=True,
        add_generation_prompt=False, parsed=False,
    ).chat  # fmt: skip
    assert {field.name for field in chat.DESCRIPTOR.fields} == {field.name for field, _ in chat.ListFields()}
    assert json.loads(chat.tools_json[0]) == WEATHER
    assert chat.tool_choice == chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED)
    assert chat.template_args_json == '{"enable_thinking": false, "name": "Zoë"}'
    assert (chat.parallel_tool_calls, chat.add_generation_prompt, chat.unparsed) == (False, False, True)
    named = generate_request(None, chat=TALK, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named.chat.tool_choice == chat_pb2.ToolChoice(name="weather")
    bare = generate_request(None, chat=TALK[:1], tools=None, parsed=None, template_args=None)
    assert bare.chat == chat_pb2.Chat(messages=SENT[:1])


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"json_schema": {"b": 1, "a": "ö"}}, constraint_pb2.Constraint(json_schema='{"b": 1, "a": "ö"}')),
        ({"json_schema": True}, constraint_pb2.Constraint(json_schema="true")),
        ({"json_schema": '{"type":"null"}'}, constraint_pb2.Constraint(json_schema='{"type":"null"}')),
        ({"json_object": True}, constraint_pb2.Constraint(json_object=constraint_pb2.JsonObject())),
        ({"regex": "a+", "json_object": False}, constraint_pb2.Constraint(regex="a+")),
        ({"choices": iter(["a", "b"])}, constraint_pb2.Constraint(choices=constraint_pb2.Choices(choices=["a", "b"]))),
        # The service refuses it; it must not become "anything".
        ({"choices": []}, constraint_pb2.Constraint(choices=constraint_pb2.Choices())),
        ({"lark": 'start: "a"'}, constraint_pb2.Constraint(lark='start: "a"')),
        ({"json_object": False, "regex": None}, None),
    ],
)
def test_each_constraint_sets_its_field(options: dict[str, Any], sent: constraint_pb2.Constraint | None) -> None:
    request = generate_request("hi", **options)
    assert request == inference_pb2.GenerateRequest(text="hi", constraint=sent)
    assert request.HasField("constraint") == (sent is not None)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {}, "neither prompt nor chat is given"),
        ("hi", {"chat": TALK}, "both prompt and chat are given"),
        ("hi", {"tools": [WEATHER]}, "tools is for a chat; the request has a prompt"),
        (None, {"chat": "hello"}, "chat is 'hello'; a list of messages is needed"),
        (None, {"chat": TALK[0]}, "chat is {'role'.*; a list of messages is needed"),
        (None, {"chat": ["hello"]}, r"chat\[0\] is 'hello'; a mapping is needed"),
        (None, {"chat": [{"content": "a"}]}, r"chat\[0\] has no role"),
        (None, {"chat": [{"role": 3}]}, r"chat\[0\].role is 3"),
        (None, {"chat": [{"role": "user", "contents": "a"}]}, r"chat\[0\] has contents; known are role, content, "),
        (None, {"chat": [{"role": "user", "content": 3}]}, r"chat\[0\].content is 3; text or a list of parts"),
        (None, {"chat": [{"role": "user", "content": "\ud800"}]}, r"chat\[0\].content has U\+D800 at character 0"),
        (
            None, {"chat": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            r"chat\[0\].content\[0\] is of type image_url; only parts of type text are taken",
        ),
        (
            None, {"chat": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
            r"chat\[0\].tool_calls\[0\].function.arguments is 3; a mapping is needed",
        ),
        (None, {"chat": TALK, "tools": [3]}, r"tools\[0\] is 3; a mapping is needed"),
        (None, {"chat": TALK, "tools": [{"a": float("nan")}]}, r"tools\[0\] cannot be written as JSON"),
        (None, {"chat": TALK, "tool_choice": "always"}, "tool_choice is 'always'; it must be auto, none, required"),
        (None, {"chat": TALK, "template_args": [1]}, r"template_args is \[1\]; a mapping is needed"),
        ("hi", {"regex": "a", "lark": "b"}, "regex and lark are given; an output has one constraint"),
        ("hi", {"json_schema": False}, "json_schema is False; a mapping is needed"),
        ("hi", {"json_object": "yes"}, "json_object is 'yes'; it must be True or False"),
        ("hi", {"choices": "ab"}, "choices is 'ab'; a list of strings is needed"),
        ("hi", {"regex": 3}, "regex is 3"),
    ],
)  # fmt: skip
def test_a_wrong_keyword_is_named(prompt: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        generate_request(prompt, **options)


def part(offset: int, **fields: Any) -> inference_pb2.GenerateResponse:
    delta = inference_pb2.Delta(token_offset=offset, token_ids=[offset], **fields)
    return inference_pb2.GenerateResponse(delta=delta)


Piece = chat_pb2.ToolCallDelta
PARTS = [
    part(0, reasoning="So "),
    part(1, reasoning="it is.", text="I "),
    part(2, text="call."),
    part(3, tool_calls=[Piece(index=0, id="abcdefghi", name="weather"), Piece(index=0, arguments='{"city"')]),
    part(4, tool_calls=[
        Piece(index=0, arguments=': "Rom"}'), Piece(index=1, id="bcdefghij", name="time", arguments="{"),
    ]),
    part(5, tool_calls=[Piece(index=1, arguments="}")]),
]  # fmt: skip
ENDING = [fake_service.finished(6, inference_pb2.FINISH_REASON_CONSTRAINT_COMPLETE), fake_service.summary(6)]
WHOLE = SampleOffset(token_ids=6, text_chars=7, reasoning_chars=9, tool_calls=2, tool_argument_chars=17)


answer = sending(*PARTS, *ENDING)


def check(stream: Any) -> None:
    (sample,) = stream.samples
    assert (sample.reasoning, sample.text, sample.tool_calls) == ("So it is.", "I call.", CALLS)
    assert stream.offsets == (WHOLE,)
    assert sample.finished.reason == FinishReason.CONSTRAINT_COMPLETE
    assert sample.message == {
        "role": "assistant",
        "content": "I call.",
        "reasoning_content": "So it is.",
        "tool_calls": [CALL, {"id": "bcdefghij", "type": "function", "function": {"name": "time", "arguments": "{}"}}],
    }


@either
def test_a_sample_collects_reasoning_and_tool_calls(service: FakeService, connect: Connect) -> None:
    service.behaviour = answer
    with connect(service.address) as client:
        stream = client.generate(chat=TALK, tools=[WEATHER])
        deltas = list(stream)
        assert client.render_chat(TALK, tools=[WEATHER]).text == "system|user|assistant|tool"
    assert [delta.reasoning for delta in deltas] == ["So ", "it is.", "", "", "", ""]
    assert [len(delta.tool_calls) for delta in deltas] == [0, 0, 0, 2, 2, 1]
    check(stream)
    assert stream.samples[0].tool_calls[0].parsed_arguments() == {"city": "Rom"}
    # The answer can be sent back.
    again = generate_request(None, chat=[*TALK, stream.samples[0].message]).chat.messages[-1]
    assert list(again.content) == ["I call."] and again.tool_calls[0].arguments_json == '{"city": "Rom"}'


def test_the_message_of_an_answer_without_text_has_no_content() -> None:
    only_calls = ChatMessage(role="assistant", tool_calls=CALLS).as_dict()
    assert only_calls["content"] is None and "reasoning_content" not in only_calls


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "", '{"a":' * 12_000])
def test_arguments_that_are_no_object_raise_value_error(arguments: str) -> None:
    with pytest.raises(ValueError):
        ToolCall(id="", name="weather", arguments=arguments).parsed_arguments()


@pytest.mark.parametrize("cut", range(1, len(PARTS)))
def test_a_lost_answer_continues_at_every_part(service: FakeService, client: Client, cut: int) -> None:
    service.behaviour = sending(*PARTS[:cut], fake_service.breaks)
    service.resumption = sending(*PARTS[cut:], *ENDING)
    stream = client.generate(chat=TALK, resume=True)
    list(stream)
    check(stream)
    ((sent,),) = (request.offsets for request in service.resumed)
    received = [made.delta for made in PARTS[:cut]]
    pieces = [call for delta in received for call in delta.tool_calls]
    assert sent == inference_pb2.SampleOffset(
        token_ids=cut,
        text_chars=sum(len(delta.text) for delta in received),
        reasoning_chars=sum(len(delta.reasoning) for delta in received),
        tool_calls=sum(bool(call.id) for call in pieces),
        tool_argument_chars=sum(len(call.arguments) for call in pieces),
    )


def test_offsets_go_on_from_what_was_read_elsewhere(service: FakeService, client: Client) -> None:
    service.resumption = sending(*PARTS[4:], *ENDING)
    before = SampleOffset(token_ids=4, text_chars=7, reasoning_chars=9, tool_calls=1, tool_argument_chars=7)
    stream = client.resume("live", bytes(32), offsets=[before])
    list(stream)
    assert service.resumed[0].offsets[0] == inference_pb2.SampleOffset(
        token_ids=4, text_chars=7, reasoning_chars=9, tool_calls=1, tool_argument_chars=7
    )
    assert stream.offsets == (WHOLE,)
    # The first call began elsewhere.
    assert stream.samples[0].tool_calls == (ToolCall(id="", name="", arguments=': "Rom"}'), CALLS[1])


def test_a_refusal_names_the_place_in_the_conversation(service: FakeService, client: Client) -> None:
    said = "chat.messages[1].role is 'boss'; it must be one of system, developer, user, assistant, tool"
    service.behaviour = fake_service.refusing_field("chat.messages[1].role", said)
    with pytest.raises(InvalidArgument, match=r"^chat\[1\].role is 'boss'; it must be") as caught:
        list(client.generate(chat=TALK))
    assert caught.value.keyword == "chat[1].role"


def test_render_chat_sends_the_options_and_returns_text_and_ids(service: FakeService, client: Client) -> None:
    rendered = client.render_chat(TALK, tools=[WEATHER], template_args={"a": 1}, model="m")
    assert (rendered.text, rendered.token_ids) == ("system|user|assistant|tool", tuple(b"system|user|assistant|tool"))
    (request,) = service.requests
    assert isinstance(request, inference_pb2.RenderChatRequest)
    assert (request.model, list(request.chat.messages)) == ("m", SENT)
    assert request.chat.template_args_json == '{"a": 1}'
