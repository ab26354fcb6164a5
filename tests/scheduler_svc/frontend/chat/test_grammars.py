"""The grammar of one chat's answer."""

import json
from collections.abc import Mapping
from unittest.mock import Mock

import pytest
from tandem.v1 import chat_pb2 as pb

from scheduler_svc.frontend.chat.conversation import read
from scheduler_svc.frontend.chat.grammars import chat_grammar
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.validate.test_request import field_of

RENDERED = Rendered(token_ids=[1], marked="x")


def tool(name: str, *, strict: bool) -> str:
    return json.dumps({"type": "function", "function": {"name": name, "parameters": {"not": {}}, "strict": strict}})


def chat(**fields: object) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=["a"])], **fields)  # pyright: ignore[reportArgumentType]


def why(field: str, schema: Mapping[str, object]) -> str:
    return "not is not supported" if "not" in schema else ""


def test_an_unsupported_strict_tool_is_named_by_its_place_among_all_tools() -> None:
    asked = chat(tools_json=[tool("f", strict=False), tool("g", strict=True)], tool_choice=pb.ToolChoice(name="g"))
    served = ServedChat(refusal="", renderer=Mock(marks={}))
    with pytest.raises(Refusal, match="tool 'g' is strict") as caught:
        chat_grammar(served, read(asked), RENDERED, content=None, json_options={}, check_schema=why)
    assert field_of(caught.value) == "chat.tools_json[1].function.parameters"


def test_a_free_answer_costs_no_look_at_the_prompt() -> None:
    """Most chats have no grammar, and this runs in the event loop."""
    asked = read(chat(tools_json=[tool("f", strict=False)]))
    served = Mock(spec=ServedChat)
    assert chat_grammar(served, asked, RENDERED, content=None, json_options={}, check_schema=why) is None
    served.prefix.assert_not_called()
