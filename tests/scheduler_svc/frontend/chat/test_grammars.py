"""The grammar of one chat's answer."""

import json
from unittest.mock import Mock

import pytest
from tandem.v1 import chat_pb2 as pb

from scheduler_svc.frontend.chat.conversation import read
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.constraints.door import AnswerGrammar
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.failures import field_of

RENDERED = Rendered(token_ids=[1], marked="x")


def tool(name: str, *, strict: bool) -> str:
    function = {"name": name, "parameters": {"type": "object"}, "strict": strict}
    return json.dumps({"type": "function", "function": function})


def chat(**fields: object) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=["a"])], **fields)  # pyright: ignore[reportArgumentType]


def test_a_tool_has_its_place_among_all_tools() -> None:
    asked = chat(tools_json=[tool("f", strict=False), tool("g", strict=True)], tool_choice=pb.ToolChoice(name="g"))
    answer = AnswerGrammar(Mock(spec=ServedChat), read(asked), RENDERED, content=None)
    [exact] = answer.exact_tools
    assert (exact.name, answer.field(exact)) == ("g", "chat.tools_json[1].function.parameters")


def test_a_free_answer_costs_no_look_at_the_prompt() -> None:
    """Most chats have no grammar, and this runs in the event loop."""
    asked = read(chat(tools_json=[tool("f", strict=False)]))
    served = Mock(spec=ServedChat)
    answer = AnswerGrammar(served, asked, RENDERED, content=None)
    assert answer.is_free and not answer.exact_tools
    served.prefix.assert_not_called()


def test_calls_that_nobody_can_write_are_refused_where_the_caller_demands_them() -> None:
    asked = chat(tools_json=[tool("f", strict=False)], tool_choice=pb.ToolChoice(name="f"))
    served = ServedChat(refusal="", renderer=Mock(marks={}))
    with pytest.raises(Refusal, match="does not know how the served model writes calls") as caught:
        AnswerGrammar(served, read(asked), RENDERED, content=None).whole(())
    assert field_of(caught.value) == "chat.tool_choice"
