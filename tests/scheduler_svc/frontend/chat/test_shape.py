"""What each template takes is found by trial, and chats are written so: their texts are those of Transformers.

The truth has the messages as a reader of the template writes them by hand; none of it comes from the shape.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from tandem.v1 import chat_pb2 as pb
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_svc.frontend.chat import conversation
from scheduler_svc.frontend.chat.conversation import ROLES, Message
from scheduler_svc.frontend.chat.forms import choose_form
from scheduler_svc.frontend.chat.shape import Content, Reasoning, Shape, probe
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.chat.rig import user
from tests.scheduler_svc.frontend.chat.test_rendering import TEMPLATES, render, shared_renderer
from tests.scheduler_svc.frontend.failures import refused
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, EOS

usual = partial(Shape, developer_is_system=True)
TURNS = ("system", "user", "assistant")
EMPTY_LINE = "\n</think>\n\n"
SHAPES: dict[str, Shape] = {
    **dict.fromkeys(TEMPLATES, usual()),
    "bundled": Shape(reasoning_to_content=EMPTY_LINE),
    "chatml": usual(most_calls=0),
    "deepseek_text": usual(arguments_as_object=False, arguments_as_text=True, needs_content=True),
    "function_gemma": usual(arguments_as_text=True),
    "gemma3": usual(most_calls=0),
    # It reads one part of the system's message.
    "gemma_parts": usual(content={"user": Content.EITHER, "assistant": Content.EITHER}),
    "gemma_tools": usual(needs_tool_name=True, reasoning=Reasoning.FIELD),
    "glm": usual(reasoning_to_content="</think>\n"),
    "glm_parts": usual(content=dict.fromkeys(TURNS, Content.EITHER), reasoning_to_content="</think>"),
    "hermes": usual(reasoning_to_content=EMPTY_LINE),
    "harmony": Shape(most_calls=1, reasoning_to_content="<|end|><|start|>assistant<|channel|>final<|message|>"),
    "llama3": usual(most_calls=1),
    "mistral_args": usual(reasoning_to_content="[/THINK]"),
    "mistral_strict": usual(
        content=dict.fromkeys(TURNS, Content.EITHER),
        arguments_as_text=True,
        needs_short_ids=True,
        reasoning=Reasoning.PART,
        reasoning_to_content="[/THINK]",
    ),
    "parts_only": usual(content=dict.fromkeys((*TURNS, "developer", "tool"), Content.PARTS)),
    "phi3": usual(most_calls=0),
    "qwen3_parts": usual(
        content=dict.fromkeys((*TURNS, "tool"), Content.EITHER),
        arguments_as_text=True,
        reasoning_to_content=EMPTY_LINE,
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_trial_finds_what_a_template_takes(name: str) -> None:
    assert shared_renderer(name)._shapes == {True: SHAPES[name], False: SHAPES[name]}


@pytest.mark.parametrize(
    ("name", "after"),
    [
        *(("bundled", "\n\n"), ("hermes", "\n\n"), ("qwen3_parts", "\n\n"), ("mistral_strict", "")),
        # Two templates of one family differ.
        *(("glm", "\n"), ("glm_parts", "")),
        # They leave reasoning out, so that of the family counts; behind harmony's a mark begins.
        *(("deepseek_v3", "\n\n"), ("kimi_k2", ""), ("gemma_tools", ""), ("harmony", "")),
    ],
)
def test_white_space_after_reasoning_is_the_templates_or_the_familys(name: str, after: str) -> None:
    form = choose_form([TEMPLATES[name]], "", None)
    assert form is not None and form.reasoning is not None
    assert form.reasoning.as_written(SHAPES[name].reasoning_to_content).after == after


def written(name: str, messages: Sequence[dict[str, Any]], **args: Any) -> str:
    """What Transformers makes of messages that are written by hand."""
    args = {"add_generation_prompt": True, "bos_token": BOS, "eos_token": EOS, **args}
    made, _ = render_jinja_template([list(messages)], chat_template=TEMPLATES[name], **args)
    return made[0]


def text(name: str, *messages: pb.ChatMessage, **fields: Any) -> str:
    return render(shared_renderer(name), pb.Chat(messages=messages, **fields)).text


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


def said(role: str, content: object, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_message_is_lost_in_a_plain_chat(name: str) -> None:
    shown = text(name, user("first question"), pb.ChatMessage(role="assistant", content=["an answer"]), user("second"))
    assert all(each in shown for each in ("first question", "an answer", "second"))


@pytest.mark.parametrize(
    ("name", "system", "users"),
    [
        # Text alone, joined as Transformers' own server joins it.
        ("chatml", "s t", "a b"),
        ("hermes", "s t", "a b"),
        ("deepseek_text", "s t", "a b"),
        # Lists, which the template joins.
        ("qwen3_parts", parts("s", "t"), parts("a", "b")),
        ("parts_only", parts("s", "t"), parts("a", "b")),
        ("mistral_strict", parts("s", "t"), parts("a", "b")),
        ("glm_parts", parts("s", "t"), parts("a", "b")),
        ("gemma_parts", "s t", parts("a", "b")),
    ],
)
def test_several_parts_are_joined_as_transformers_joins_them(name: str, system: object, users: object) -> None:
    asked = (pb.ChatMessage(role="system", content=["s", "t"]), user("a", "b"))
    assert text(name, *asked) == written(name, [said("system", system), said("user", users)])


def test_a_list_of_which_a_template_reads_the_first_part_has_one() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
    shape = probe(lambda messages, _: render_jinja_template([messages], chat_template=template)[0][0])
    assert set(shape.content.values()) == {Content.ONE_PART}
    assert shape.messages([Message(role="user", parts=("a", "b"))]) == [said("user", parts("a b"))]


CALL = pb.ToolCall(id="call_0123456789", name="f", arguments_json='{"a":"ä"}')
ASKED = (
    user("q"),
    pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[CALL]),
    pb.ChatMessage(role="tool", content=["outcome"], tool_call_id=CALL.id),
)


def loop(name: str, arguments: object, *, call_id: str = CALL.id, result: object = "outcome", **more: Any) -> str:
    """The same chat by hand. `more`: other fields of the messages, by role."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    question = parts("q") if name == "parts_only" else "q"
    asked = {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm", **more.get("assistant", {})}
    answer = said("tool", result, tool_call_id=call_id, **more.get("tool", {}))
    return written(name, [said("user", question), asked, answer])


OBJECT, TEXT = {"a": "ä"}, '{"a":"ä"}'
LOOPS: dict[str, dict[str, Any]] = {
    "deepseek_text": {"arguments": TEXT, "assistant": {"content": ""}},
    "gemma_tools": {"arguments": OBJECT, "tool": {"name": "f"}, "assistant": {"reasoning": "hm"}},
    "llama3_strict": {"arguments": OBJECT},
    "mistral_strict": {"arguments": OBJECT, "assistant": {"content": [{"type": "thinking", "thinking": "hm"}]}},
    "parts_only": {"arguments": OBJECT, "result": parts("outcome")},
    "qwen3_parts": {"arguments": OBJECT},
    "hermes": {"arguments": OBJECT},
    "deepseek_v3": {"arguments": OBJECT},
    "kimi_k2": {"arguments": OBJECT},
    "harmony": {"arguments": OBJECT},
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_the_second_turn_of_a_tool_loop(name: str) -> None:
    shown, given = text(name, *ASKED), dict(LOOPS[name])
    if name == "mistral_strict":
        # The template takes ids of 9 characters only; whichever those are, call and result have the same one.
        given["call_id"] = shown.partition("[CALL_ID]")[2][:9]
        assert given["call_id"].isalnum() and given["call_id"] != CALL.id
    assert shown == loop(name, **given)


# They refuse a chat with roles that do not alternate, or the role of tools.
REFUSES_TOOLS = ("gemma_parts", "llama2")


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - LOOPS))
def test_a_tool_loop_is_shown_or_refused(name: str) -> None:
    if SHAPES[name].most_calls == 0 or name in REFUSES_TOOLS:
        with pytest.raises(Refusal, match=r"shows none|chat template refuses the chat"):
            text(name, *ASKED)
    else:
        shown = text(name, *ASKED)
        assert "ä" in shown and "outcome" in shown


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_results_belong_to_their_calls_by_id_or_in_their_order(order: tuple[int, int]) -> None:
    """Whichever ids the template takes. Calls and results without ids get them in their order."""

    def shown(name: str, *ids: str) -> str:
        calls = [pb.ToolCall(id=each, name=f"f{i}", arguments_json="{}") for i, each in enumerate(ids)]
        results = [pb.ChatMessage(role="tool", content=[f"r{i}"], tool_call_id=ids[i]) for i in order]
        return text(name, user("q"), pb.ChatMessage(role="assistant", tool_calls=calls), *results)

    for ids in (("call_0_long", "call_1_long"), *([("", "")] if order == (0, 1) else [])):
        made = shown("mistral_strict", *ids)
        found = [each[:9] for each in made.split("[CALL_ID]")[1:]]
        assert len(set(found)) == 2
        assert all(f"{each}[TOOL_CONTENT]r{i}" in made for i, each in enumerate(found))
    of_gemma = shown("gemma_tools", "call_0_long", "call_1_long")
    assert "response:f1{value:r1}" in of_gemma and "response:f0{value:r0}" in of_gemma


def test_developer_is_system_where_the_template_knows_no_other() -> None:
    for name in TEMPLATES:
        role = "system" if SHAPES[name].developer_is_system else "developer"
        by_role = [text(name, pb.ChatMessage(role=each, content=["rules"]), user("q")) for each in ("developer", role)]
        assert by_role[0] == by_role[1] and "rules" in by_role[0], name


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ('{"city": "Par', {"arguments": '{"city": "Par'}),
    ("null", {}),
    ('""', {}),
    ("[]", {}),
    ("[1]", {"arguments": "[1]"}),
    ("7", {"arguments": "7"}),
    ('"{\\"a\\": 1}"', {"a": 1}),
    ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
    ('{"a": "\\ud800"}', {"arguments": '{"a": "\\ud800"}'}),
    ("{" * 100_000, {"arguments": "{" * 100_000}),
]


@pytest.mark.parametrize(("given", "nearest"), BROKEN, ids=[each[0][:16] for each in BROKEN])
def test_arguments_of_the_history_are_never_refused(given: str, nearest: dict[str, Any]) -> None:
    call = pb.ToolCall(id="abcDEF123", name="f", arguments_json=given)
    chat = (user("q"), pb.ChatMessage(role="assistant", tool_calls=[call]), pb.ChatMessage(role="tool", content=["r"]))
    [made] = conversation.read(pb.Chat(messages=chat)).messages[1].calls
    assert (made.text, made.arguments, made.is_object) == (given, nearest, False)
    if len(given) > 1000:
        return
    # As it is where the template takes text; else the nearest object.
    for name in ("deepseek_text", "qwen3_parts", "mistral_strict"):
        assert given in text(name, *chat), name
    for name in ("hermes", "llama3_strict", "gemma_tools"):
        expected = json.dumps(nearest, ensure_ascii=False)
        assert expected in text(name, *chat), name


def test_arguments_that_are_left_out_are_an_empty_object() -> None:
    for name in ("deepseek_text", "hermes"):
        call = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="abcDEF123", name="f")])
        assert "{}" in text(name, user("q"), call, pb.ChatMessage(role="tool", content=["r"]))


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "system"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "tool"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", "assistant"),
        ("{{ messages[-1].content }}", "user"),
    ],
)
def test_a_message_that_the_template_would_drop_is_refused_by_name(template: str, role: str) -> None:
    renderer = shared_renderer("chatml", template)
    chat = pb.Chat(messages=[pb.ChatMessage(role=role, content=["a"]), user("a")])
    why = f"chat.messages[0].content would be lost: the model's chat template leaves this message of {role} out"
    assert refused(render, renderer, chat).message == why
    # Nothing is lost of a message without text.
    chat.messages[0].content[:] = [" \n"]
    assert render(renderer, chat).text


def test_calls_that_the_template_would_drop_are_refused_by_name() -> None:
    calls = [pb.ToolCall(id="abcDEF123", name="f", arguments_json="{}")] * 2
    for name, most in (("chatml", "none"), ("harmony", "1")):
        why = refused(text, name, user("q"), pb.ChatMessage(role="assistant", tool_calls=calls)).message
        assert why == f"chat.messages[1].tool_calls has 2 calls; the model's chat template shows {most}"


@pytest.mark.parametrize("role", ROLES)
def test_a_template_that_cannot_be_tried_has_the_usual_shape(role: str) -> None:
    shape = probe(lambda messages, tools: (_ for _ in ()).throw(TypeError("no")))
    assert shape == Shape()
    assert shape.messages([Message(role=role, parts=("a",))]) == [said(role, "a")]
