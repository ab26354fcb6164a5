"""Every kind of constraint beside reasoning and tools, for every family of models: which answers its grammar takes.

The answers are written by `answers`, which knows nothing of grammars, and are read by the parser of chats.
"""

import functools
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from llguidance import LLMatcher, LLTokenizer
from tandem.v1 import chat_pb2
from tandem.v1 import constraint_pb2 as pb
from tokenizers import Tokenizer

from scheduler_svc.frontend.chat.conversation import read
from scheduler_svc.frontend.chat.forms import choose_form
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.constraints.door import AnswerGrammar
from scheduler_svc.frontend.constraints.grammar import grammar_of
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.chat.answers import FAMILIES, Family
from tests.scheduler_svc.frontend.chat.test_answer import calls_of, parsed, parser

MODEL = Path(__file__).parents[4] / "gpu_worker/bundled/model/tokenizer.json"
CALLS = [("store", {"a": "x"}), ("store", {"a": "y"})]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
PARAMETERS["additionalProperties"] = False
# A content that each kind of constraint takes, and one that it does not.
KINDS: dict[str, tuple[pb.Constraint, str, str]] = {
    "json_schema": (pb.Constraint(json_schema=json.dumps({"enum": ["no"]})), '"no"', '"yes"'),
    "json_object": (pb.Constraint(json_object=pb.JsonObject()), '{"k": 1}', "[1]"),
    "regex": (pb.Constraint(regex="[a-c]{2}/"), "ab/", "ad/"),
    "choices": (pb.Constraint(choices=pb.Choices(choices=["yes", "no way"])), "no way", "no"),
    "lark": (pb.Constraint(lark='start: word " " word\nword: /[a-z]+/'), "so be", "so 1"),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """`fields` of a chat. `num_calls` that its answer may have; content is possible if 0 is among them."""

    fields: dict[str, Any]
    num_calls: tuple[int, ...]
    is_strict: bool = False


def of(num_calls: tuple[int, ...], *, strict: bool = False, **fields: Any) -> Tools:
    function = {"name": "store", "parameters": PARAMETERS, "strict": strict}
    tool = json.dumps({"type": "function", "function": function})
    return Tools({"tools_json": [tool], **fields}, num_calls, strict)


REQUIRED = chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED)
TOOLS = {
    "no tools": Tools({}, (0,)),
    "auto": of((0, 1, 2)),
    "auto, strict": of((0, 1, 2), strict=True),
    "at most one": of((0, 1), parallel_tool_calls=False),
    "required": of((1, 2), tool_choice=REQUIRED),
    "named": of((1,), tool_choice=chat_pb2.ToolChoice(name="store")),
}


def reasonings(family: Family) -> list[tuple[str, str, str]]:
    """(what the prompt has of the message, what the answer has, the reasoning)."""
    if family.reasoning is None:
        return [("", "", "")]
    written = family.reasoning("well")
    opened = written[: written.index("well")]
    return [("", "", ""), ("", written, "well"), (opened, written.removeprefix(opened), "well"), (written, "", "")]


@functools.cache
def tokens() -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    """The bundled model's tokenizer with the marks of all families."""
    tokenizer, marks = Tokenizer.from_file(str(MODEL)), dict[str, None]()
    for family in FAMILIES.values():
        sample = family.written(CALLS) + family.content("c")
        marks |= dict.fromkeys(re.findall(r"<[\w|/｜▁\"]+>|\[[A-Z_/]+\]", sample))
    tokenizer.add_special_tokens(list(marks))
    end = tokenizer.token_to_id("<|endoftext|>")
    inner = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=end)
    return tokenizer, inner, {mark: tokenizer.token_to_id(mark) for mark in marks}


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher.reset()
    ids = tokens()[0].encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def matcher_of(name: str, prefix: str, kind: pb.Constraint, tools: Tools) -> LLMatcher:
    form = choose_form([FAMILIES[name].literals], "", None)
    assert form is not None
    served = Mock(spec=ServedChat, form=form)
    served.renderer.marks, served.prefix.return_value = tokens()[2], prefix
    served.reasoning.return_value = form.reasoning
    asked = chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user", content=["a"])], **tools.fields)
    rendered = Rendered(token_ids=[1], marked="x")
    answer = AnswerGrammar(served, read(asked), rendered, content=grammar_of(kind))
    for tool in answer.exact_tools:
        if tool.is_strict and (why := answer.why_loose(tool)):
            raise ValueError(why)
    made = answer.whole({tool.name for tool in answer.exact_tools if answer.why_loose(tool)})
    assert made is not None
    matcher = LLMatcher(tokens()[1], made, log_level=0)
    assert not matcher.get_error(), (made, matcher.get_error())
    return matcher


# Their formats of calls take no schema, or are unknown.
UNSERVED = {
    "gemma4": ["auto, strict"],
    "function-gemma": ["auto, strict"],
    "think": ["auto, strict", "required", "named"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_constraint_holds_beside_reasoning_and_tools(name: str) -> None:
    family = FAMILIES[name]
    # All pairs of a kind, a choice and a state of reasoning, which is another one for each family.
    states, shift = reasonings(family), list(FAMILIES).index(name)
    for i, (kind, choice) in enumerate(itertools.product(KINDS, TOOLS), shift):
        (constraint, right, wrong), tools = KINDS[kind], TOOLS[choice]
        prefix, written, reasoning = states[(i + (i - shift) // len(TOOLS)) % len(states)]
        place = (kind, choice, prefix, written)
        if choice in UNSERVED.get(name, ()):
            with pytest.raises((Refusal, ValueError), match=r"no schema is enforced|does not know how"):
                matcher_of(name, prefix, constraint, tools)
            continue
        made = matcher_of(name, prefix, constraint, tools)
        has_content = 0 in tools.num_calls
        content = family.content(right).removesuffix("<|end|>")
        assert accepts(made, written + content) == has_content, place
        assert not accepts(made, written + family.content(wrong).removesuffix("<|end|>")), place
        assert not accepts(made, written + "Well: " + content), place
        if has_content:
            read_back = parsed(parser(name, prefix), [written + content])
            assert (read_back.content, read_back.reasoning) == (right, reasoning), place
        for num_calls in (1, 2) if family.calls is not None else ():
            text = written + family.written(CALLS[:num_calls], "")
            # A second call of harmony begins a message of its own.
            is_right = num_calls in tools.num_calls and (num_calls == 1 or name != "harmony")
            # A call of Llama's is a JSON object.
            is_content = name == "llama3" and kind == "json_object" and has_content and num_calls == 1
            assert accepts(made, text) == (is_right or is_content), (*place, text)
            assert calls_of(parsed(parser(name, prefix), [text])) == CALLS[:num_calls], place


# Contents that begin and end with white space, as a model would also write it after its marks.
SPACED = {
    "choices": (pb.Constraint(choices=pb.Choices(choices=["\nyes", " no\n", "no"])), ["\nyes", " no\n", "no"]),
    "regex": (pb.Constraint(regex="[ \\n]{0,3}[a-c]+"), ["\n\nab", " c", "b"]),
    "lark": (pb.Constraint(lark='start: "\\n" word " "\nword: /[a-z]+/'), ["\nso "]),
    "json_schema": (pb.Constraint(json_schema=json.dumps({"enum": [" no"]})), ['" no"']),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", SPACED)
def test_white_space_of_a_constraint_is_the_callers_to_the_letter(name: str, kind: str) -> None:
    """With and without reasoning and tools, whole and character by character."""
    family, (constraint, contents) = FAMILIES[name], SPACED[kind]
    form = choose_form([family.literals], "", None)
    after = form.reasoning.after if form is not None and form.reasoning is not None else ""
    # Half of the states beside tools; others for each kind and family.
    shift = list(FAMILIES).index(name) + list(SPACED).index(kind)
    for i, (prefix, written, reasoning) in enumerate(reasonings(family), shift):
        tools = ("no tools", "auto")[(i - shift) // 2 ^ i % 2]
        made = matcher_of(name, prefix, constraint, TOOLS[tools])
        for content in contents:
            text = written + family.content(content).removesuffix("<|end|>")
            place = (prefix, text, tools)
            assert accepts(made, text), place
            if kind == "choices" and written:
                assert not accepts(made, f"{written} {text.removeprefix(written)}"), place
            for pieces in ([text], list(text)):
                how: Any = {"has_constraint": True, "after_reasoning": after}
                read_back = parsed(parser(name, prefix, **how), pieces)
                assert (read_back.content, read_back.reasoning) == (content, reasoning), place
