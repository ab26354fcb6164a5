"""The check of a chat's tools, and of the choice between them."""

from typing import Any

import pytest
from tandem.v1 import chat_pb2 as pb

from scheduler_svc.frontend.chat.conversation import Calls, choose, read_tools
from scheduler_svc.frontend.rpc.status import Refusal

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)


def test_tools_are_read_as_openai_writes_them() -> None:
    now, weather = read_tools([NOW, WEATHER])
    assert (now.name, now.is_strict, now.parameters["properties"]) == ("now", False, {})
    assert (weather.name, weather.is_strict, weather.parameters) == ("weather", True, {"type": "object"})


def test_arguments_are_an_object_also_if_the_schema_does_not_say_so() -> None:
    (tool,) = read_tools([{"function": {"name": "a", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": True}}}}])
    assert tool.parameters["type"] == "object"


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([NOW, NOW], r"chat.tools_json\[1\] is the second tool with the name 'now'"),
        (["now"], r"chat.tools_json\[0\] is 'now'; it must be a JSON object"),
        ([{"type": "web_search"}], r"chat.tools_json\[0\].type is 'web_search'; only 'function' is served"),
        ([{"function": None}], r"chat.tools_json\[0\].function is None; it must be a JSON object"),
        ([{"function": {"name": "a b"}}], r"function.name is 'a b'; it must be 1 to 128 letters"),
        ([{"function": {"name": "x" * 129}}], r"function.name is 'x+\.\.\.; it must be 1 to 128 letters"),
        ([{"function": {"name": "a", "parameters": []}}], r"parameters is \[\]; it must be a JSON object"),
        (
            [{"function": {"name": "a", "parameters": {"type": "string"}, "strict": True}}],
            r"parameters: its type is 'string'; arguments are a JSON object, so it must be 'object'",
        ),
        ([{"function": {"name": "a", "strict": "yes"}}], r"strict is 'yes'; it is a boolean"),
        ([{"function": {"name": "a", "schema": {}}}], r"has 'schema', which this server does not know"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_field(tools: list[object], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        read_tools(tools)


@pytest.mark.parametrize(
    ("kind", "why"), [("string", "its type is 'string'"), (["object", "null"], ""), (["null"], "its")]
)
def test_a_tool_that_is_not_strict_may_say_anything_of_its_arguments(kind: object, why: str) -> None:
    (tool,) = read_tools([{"function": {"name": "a", "parameters": {"type": kind, "title": "t"}}}])
    assert tool.parameters["type"] == "object" and tool.why_loose.startswith(why) and bool(tool.why_loose) == bool(why)


@pytest.mark.parametrize(
    ("chat", "names", "calls"),
    [
        (pb.Chat(), ["now", "weather"], Calls.ANY),
        (pb.Chat(parallel_tool_calls=False), ["now", "weather"], Calls.AT_MOST_ONE),
        (pb.Chat(tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO)), ["now", "weather"], Calls.ANY),
        (pb.Chat(tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)), [], Calls.NONE),
        (pb.Chat(tool_choice=REQUIRED), ["now", "weather"], Calls.AT_LEAST_ONE),
        (pb.Chat(tool_choice=REQUIRED, parallel_tool_calls=False), ["now", "weather"], Calls.EXACTLY_ONE),
        (pb.Chat(tool_choice=pb.ToolChoice(name="weather")), ["weather"], Calls.EXACTLY_ONE),
    ],
)
def test_the_choice_says_which_tools_and_how_often(chat: pb.Chat, names: list[str], calls: Calls) -> None:
    choice = choose(chat, read_tools([NOW, WEATHER]))
    assert ([tool.name for tool in choice.tools], choice.calls) == (names, calls)
    assert choose(pb.Chat(), ()).calls is Calls.NONE


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (pb.ToolChoice(name="never"), "chat.tool_choice.name is 'never', which is not a name of a tool; tools: none"),
        (REQUIRED, "mode is required, and chat.tools_json is empty"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(choice: pb.ToolChoice, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        choose(pb.Chat(tool_choice=choice), ())
