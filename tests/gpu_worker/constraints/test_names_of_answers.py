"""Names of objects in answers of chats: in the arguments of calls, for every family of models, and behind reasoning."""

import functools
import json
import random
import re
from typing import Any
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
from tandem.v1 import chat_pb2
from tandem.v1.constraint_pb2 import Constraint

from gpu_worker.constraints.matchers import FollowedRow, Matchers
from scheduler_svc.frontend.chat.conversation import read
from scheduler_svc.frontend.chat.forms import choose_form
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.chat.served import ServedChat
from scheduler_svc.frontend.constraints.door import AnswerGrammar
from scheduler_svc.frontend.constraints.grammar import grammar_of
from tests.gpu_worker.constraints.rig import bits
from tests.gpu_worker.constraints.test_names import objects
from tests.scheduler_svc.frontend.chat.answers import FAMILIES
from tests.scheduler_svc.frontend.chat.test_answer import calls_of, parsed, parser
from tests.scheduler_svc.frontend.chat.test_constrained_answers import tokens

FREE = {"type": "object", "additionalProperties": {"enum": [1, {}]}, "minProperties": 3, "maxProperties": 5}
PATTERN = {
    "type": "object", "patternProperties": {"^[ab]{6,7}$": {"enum": [1]}}, "additionalProperties": False,
    "minProperties": 7, "maxProperties": 9,
}  # fmt: skip
# The values of tagged arguments; such a family lists the names of the arguments themselves.
INSIDE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "free": FREE, "scalar": {"enum": ["{", 1]}, "last": FREE},
    "required": ["text", "free", "scalar", "last"], "additionalProperties": False,
}  # fmt: skip
# A model that does not like marks never ends a text.
SHORT = {**INSIDE, "properties": {**INSIDE["properties"], "text": {"enum": ["{'a': 1}", "b"]}}}
JSON_FAMILIES = [
    name for name, family in FAMILIES.items() if family.calls is not None and not name.endswith(("gemma4", "-gemma"))
]
REQUIRED = chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED)
# Objects that are none of an answer.
LURE = '{"name": "free", "arguments": {"a": 1, "a'


@functools.cache
def matchers() -> Matchers:
    return Matchers(tokens()[1], eos_token_ids=[end_id()])


def end_id() -> int:
    return tokens()[0].token_to_id("<|endoftext|>")


@functools.cache
def liked_and_marks() -> tuple[set[int], set[int]]:
    """The tokens that the model likes, and those that end something."""
    _, inner, marks = tokens()
    ids, ends = range(inner.vocab_size), {*marks.values(), end_id()}
    return {*ends, *(id_ for id_ in ids if set(inner.decode_bytes([id_])) <= set(b'ab": 1,{}'))}, ends


def row_of(
    name: str,
    *,
    content: str | None = None,
    tagged: object = INSIDE,
    more: dict[str, Any] | None = None,
    **fields: object,
) -> FollowedRow:
    """A row of an answer to a chat with these fields, without tools if there is a content. `more`: more tools."""
    form = choose_form([FAMILIES[name].literals], "", None)
    assert form is not None
    served = Mock(spec=ServedChat, form=form)
    served.reasoning.return_value = form.reasoning
    served.renderer.marks, served.prefix.return_value = tokens()[2], ""
    schemas = {"inside": tagged} if FAMILIES[name].is_tagged else {"free": FREE, "pattern": PATTERN}
    schemas = {**(more or {}), **schemas}
    functions = [{"name": name, "parameters": schema, "strict": name != "text"} for name, schema in schemas.items()]
    tools = [json.dumps({"type": "function", "function": function}) for function in functions if content is None]
    asked = chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user", content=["a"])], tools_json=tools, **fields)  # pyright: ignore[reportArgumentType]
    rendered = Rendered(token_ids=[1], marked="x")
    grammar = AnswerGrammar(served, read(asked), rendered, content=content).whole(())
    assert grammar is not None
    found, row_of.start = matchers(), getattr(row_of, "start", 0) + 1  # type: ignore[attr-defined]
    found.define(1, found.compiled(grammar.encode()))
    return found.row(1, row_of.start, 1)  # type: ignore[attr-defined]


def allowed(row: FollowedRow) -> list[int]:
    words = np.zeros(-(-tokens()[1].vocab_size // 32), np.int32)
    matchers().fill(row, words.ctypes.data)
    return bits(words)


def take(row: FollowedRow, text: str, *more: str) -> None:
    """The tokens of a text, and then these tokens."""
    tokenizer = tokens()[0]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    matchers().take(row, [*ids, *map(tokenizer.token_to_id, more)])


def walked(row: FollowedRow, seed: int, most: int = 250) -> str | None:
    """The output of a model that likes `a`, quotes and commas; None if it does not end."""
    found, draw, ids, (liked, ends) = matchers(), random.Random(seed), list[int](), liked_and_marks()
    while not found.is_complete(row):
        every = allowed(row)
        assert every, f"no token after {tokens()[0].decode(ids, skip_special_tokens=False)!r}"
        wanted = ends if draw.random() < 0.3 else liked
        some = [id_ for id_ in every if id_ in wanted] or [id_ for id_ in every if id_ in liked]
        ids.append(draw.choice(some if some and draw.random() < 0.97 else every))
        if ids[-1] == end_id():
            break
        if len(ids) == most:
            return None
        found.take(row, ids[-1:])
    return tokens()[0].decode([id_ for id_ in ids if id_ != end_id()], skip_special_tokens=False)


def assert_no_name_twice(text: str) -> None:
    at = text.find("{")
    while at >= 0:
        try:
            _, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            end = at + 1
        else:
            for names in objects(text[at:end]):
                assert len(set(names)) == len(names), text
        at = text.find("{", end)


@pytest.mark.parametrize("name", JSON_FAMILIES)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_no_object_of_a_call_has_a_name_twice(name: str, choice: str) -> None:
    num_calls = 0
    for seed in range(4 if choice == "required" else 2):
        fields = {"tool_choice": REQUIRED, "parallel_tool_calls": seed == 0} if choice == "required" else {}
        text = walked(row_of(name, tagged=SHORT, **fields), seed)
        if text is None:
            continue
        answer = text.rpartition("</think>")[2].rpartition("[/THINK]")[2].rpartition("<|start|>")[2]
        if FAMILIES[name].is_tagged:
            answer = " ".join(re.findall(r"(?:free|last)(?:>|</arg_key>)\n(?:<arg_value>)?({.*)", answer))
        assert_no_name_twice(answer)
        types = {"inside": {key: {"type": "string" if key == "text" else "object"} for key in SHORT["properties"]}}
        whole = parsed(parser(name, types=types if FAMILIES[name].is_tagged else {}), [text])
        for tool, arguments in calls_of(whole):
            num_calls += 1
            if tool == "inside":
                arguments = {**arguments, "scalar": 1}
            jsonschema.validate(arguments, {"free": FREE, "pattern": PATTERN, "inside": SHORT}[tool])
    assert num_calls or choice == "auto"


REASONING = [name for name in FAMILIES if FAMILIES[name].reasoning is not None]


CONTENTS = (
    Constraint(json_schema=json.dumps(FREE)),
    Constraint(lark=f"start: %json {json.dumps({**FREE, 'x-guidance': {'whitespace_flexible': False}})}"),
)


@pytest.mark.parametrize("content", CONTENTS, ids=["json_schema", "lark"])
@pytest.mark.parametrize("name", REASONING)
def test_an_answer_behind_reasoning_has_no_name_twice(name: str, content: Constraint) -> None:
    """Reasoning is text, even if it looks like an object."""
    family, quote = FAMILIES[name], tokens()[0].token_to_id('"')
    assert family.reasoning is not None
    before, _, after = family.reasoning(LURE).partition(LURE)
    for seed in range(2):
        row = row_of(name, content=grammar_of(content))
        take(row, before + LURE)
        assert quote in allowed(row)
        take(row, after.strip("\n") + family.content("{").partition("{")[0])
        text = walked(row, seed)
        assert text is not None
        assert_no_name_twice(text)
        jsonschema.validate(json.loads(text), FREE)


@pytest.mark.parametrize("name", ["hermes", "deepseek-v3", "kimi-k2", "qwen-xml", "glm", "llama3", "mistral-list"])
def test_the_name_is_taken_out_of_the_mask(name: str) -> None:
    """In the second call too, and again after text with braces."""
    family, quote = FAMILIES[name], tokens()[0].token_to_id('"')
    assert family.calls is not None
    args = {"a": 1, "b": 1, "c": 1}
    call = ("free", args)
    if family.is_tagged:
        call = ("inside", {"text": 'x {"a": 1, "a": 1, "', "free": args, "scalar": 1, "last": args})
    text = family.calls([call, call])
    row = row_of(name, tool_choice=REQUIRED)
    take(row, text[: text.rindex('"b"')], '"', "a")
    assert quote not in allowed(row)
    take(row, "", "a")
    assert quote in allowed(row)


TEXT_HERE = {"type": "object", "properties": {"free": {"type": "string"}}, "required": ["free"]}


@pytest.mark.parametrize("name", [name for name in JSON_FAMILIES if FAMILIES[name].is_tagged])
@pytest.mark.parametrize("other", [TEXT_HERE, {"type": "object"}], ids=["text", "any name"])
def test_an_argument_may_be_text_in_one_tool_and_json_in_another(name: str, other: object) -> None:
    family, quote = FAMILIES[name], tokens()[0].token_to_id('"')
    assert family.calls is not None
    lure, args = 'x {"a": 1, "a": 1, "', {"a": 1, "b": 1, "c": 1}
    calls = [("text", {"free": lure}), ("inside", {"text": "b", "free": args, "scalar": 1, "last": args})]
    for order in (calls, [calls[1], calls[0], calls[1]]):
        text = family.calls(order)
        row = row_of(name, tagged=SHORT, more={"text": other}, tool_choice=REQUIRED)
        take(row, text[: text.rindex('"b"') + 1], "a")
        assert quote not in allowed(row)
        # The braces of a text are none of JSON.
        row = row_of(name, tagged=SHORT, more={"text": other}, tool_choice=REQUIRED)
        take(row, text[: text.index(lure) + len(lure)], "a")
        assert quote in allowed(row)
