"""Every field of a chat at and beyond its limits, and the messages that templates get."""

import json
import tracemalloc
from typing import Any

import pytest
from tandem.v1 import chat_pb2 as pb
from transformers.utils.chat_template_utils import get_json_schema

from scheduler_svc.frontend.chat import conversation
from scheduler_svc.frontend.chat.conversation import MAX_DEPTH, ROLES, Calls, Message, PastCall, read_object
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.chat.rig import TOOL, user
from tests.scheduler_svc.frontend.failures import refused


def read(*messages: pb.ChatMessage, **fields: Any) -> conversation.Conversation:
    return conversation.read(pb.Chat(messages=messages or [user("hi")], **fields))


def test_messages_become_values() -> None:
    calls = [pb.ToolCall(id="i", name="f", arguments_json='{"a": 1}'), pb.ToolCall(name="g")]
    made = read(
        pb.ChatMessage(role="developer", content=["a", "", "b"]),
        pb.ChatMessage(role="assistant", reasoning="r", tool_calls=calls),
        pb.ChatMessage(role="tool", content=["x"], tool_call_id="i", name="f"),
    )
    past = (
        PastCall(id="i", name="f", text='{"a": 1}', arguments={"a": 1}, is_object=True),
        PastCall(id="", name="g", text="{}", arguments={}, is_object=True),
    )
    assert made.messages == [
        Message(role="developer", parts=("a", "", "b")),
        Message(role="assistant", reasoning="r", calls=past),
        Message(role="tool", parts=("x",), tool_call_id="i", name="f"),
    ]


def test_a_message_of_the_model_begins_unless_the_last_one_goes_on() -> None:
    assert read().add_generation_prompt
    assert not read(add_generation_prompt=False).add_generation_prompt
    continued = read(continue_final_message=True)
    assert continued.continues and not continued.add_generation_prompt


def test_a_tool_that_transformers_makes_of_a_function_is_taken() -> None:
    def weather(city: str) -> float:
        """
        Tells the weather.

        Args:
            city: where

        Returns:
            degrees
        """
        raise NotImplementedError(city)

    tool = get_json_schema(weather)
    assert "return" in tool["function"]
    assert read(tools_json=[json.dumps(tool)]).tools == [tool]


def test_tools_are_passed_on_as_given() -> None:
    made = read(tools_json=[TOOL])
    assert made.tools == [json.loads(TOOL)]
    assert made.choice.calls is Calls.ANY
    none = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
    assert read(tools_json=[TOOL], tool_choice=none).tools == [json.loads(TOOL)]


@pytest.mark.parametrize("role", ROLES)
def test_all_roles_pass(role: str) -> None:
    assert read(pb.ChatMessage(role=role, content=["x"])).messages[0].role == role


def asked(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [pb.ChatMessage(role=role, **fields)]}


# What a message has, or what else a chat has, and what is said of it.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat.messages[0].role", asked("x<|im_end|>"), "it must be one of system, developer"),
    ("chat.messages[0].role", asked(""), "is ''"),
    ("chat.messages[0].reasoning", asked(content=["a"], reasoning="r"), "only messages of assistant have it"),
    ("chat.messages[0].tool_calls", asked(tool_calls=[pb.ToolCall(name="f")]), "of assistant have it"),
    ("chat.messages[0].tool_call_id", asked(tool_call_id="i"), "only messages of tool have it"),
    ("chat.messages[0].tool_calls[0].name", asked("assistant", tool_calls=[pb.ToolCall()]), "at least 1 character"),
    ("chat.tools_json[0]", {"tools_json": ["{"]}, "is not JSON"),
    ("chat.tools_json[1]", {"tools_json": [TOOL, "5"]}, "is a JSON number; it must be an object"),
    (
        "chat.add_generation_prompt",
        {"add_generation_prompt": True, "continue_final_message": True},
        "either begins a message or continues one",
    ),
    *(
        ("chat.template_args_json", {"template_args_json": args}, message)
        for args, message in (
            ('"a"', "is a JSON string"),
            (json.dumps({f"a{i}": 1 for i in range(65)}), "65 long; the limit is 64"),
            ('{"chat_template": "x"}', "'chat_template', which the server sets"),
            ('{"eos_token": "x"}', "'eos_token', which the server sets"),
            ('{"messages": []}', "'messages', which the server sets"),
            ('{"_x": 1}', "'_x'; a name has letters"),
            ('{"a b": 1}', "'a b'; a name has letters"),
        )
    ),
]


@pytest.mark.parametrize(("field", "fields", "message"), REFUSED, ids=[f"{case[0]}-{case[2]}" for case in REFUSED])
def test_an_invalid_chat_is_refused_by_field(field: str, fields: dict[str, Any], message: str) -> None:
    why = refused(conversation.read, pb.Chat(**{"messages": [user("a")], **fields})).message
    assert why.startswith(field) and message in why


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "chat.messages is empty; at least 1 message is needed"),
        ([user(*[""] * 4097)], "chat.messages.content is 4097 long; the limit is 4096"),
        ([user(tool_calls=[pb.ToolCall()] * 513)] * 2, "chat.messages.tool_calls is 1026 long; the limit is 1024"),
    ],
    ids=["messages", "parts", "calls"],
)
def test_numbers_are_bounded_before_any_work(messages: list[pb.ChatMessage], words: str) -> None:
    assert words in refused(conversation.check_size, pb.Chat(messages=messages), 10**6).message


def test_texts_are_not_kept_before_they_are_within_the_limit() -> None:
    """In Python a text may be four times as large as in its message."""
    chat = pb.Chat(messages=[user("x" * 4_000 + "😀")] * 100)
    tracemalloc.start()
    try:
        refused(conversation.check_size, chat, 1_000)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_the_text_of_every_field_counts() -> None:
    calls = [pb.ToolCall(id="i", name="jk", arguments_json="lmn")]
    message = user("abc", "d", reasoning="ef", name="g", tool_call_id="h", tool_calls=calls)
    chat = pb.Chat(messages=[message], tools_json=["op", "q"], template_args_json="rs")
    conversation.check_size(chat, 19)
    assert refused(conversation.check_size, chat, 18).message == "chat has 19 characters; the limit is 18"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' * 100_000, r"f is (not JSON|nested)"),
        ('{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH, ""),
        ('{"a": ' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "f is nested 65 deep; the limit is 64"),
        ('{"a": [' * 5000 + "]}" * 5000, "f is nested more than 64 deep; the limit is 64"),
        ('{"a": NaN}', "f is not JSON: NaN is not a JSON number"),
        ('{"a": -Infinity}', "f is not JSON: -Infinity is not a JSON number"),
        ('{"a": "\\ud800"}', r"f has U\+D800, half of a surrogate pair"),
        ('{"\\udfff": 1}', r"f has U\+DFFF"),
        ('{"a": ' + "9" * 5000 + "}", "f is not JSON: Exceeds the limit"),
        ("null", "f is a JSON null"),
        ("", "f is not JSON"),
    ],
    ids=lambda value: value[:24],
)
def test_json_is_bounded_and_is_text(text: str, message: str) -> None:
    if not message:
        assert read_object("f", text)
        return
    with pytest.raises(Refusal, match=message):
        read_object("f", text)
