"""The grammars of calls, against llguidance's own matcher and readers of calls that are written here.

Answers are random walks through the masks, so they can be any text that a model could write under the constraint.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from scheduler_svc.frontend.chat.conversation import Calls, Choice, Tool
from scheduler_svc.frontend.chat.forms import CallFormat, ReasoningFormat, TaggedArguments
from scheduler_svc.frontend.constraints.answer_grammar import TEXT, AnswerFormat, Marks, answer_grammar, why_not_held
from scheduler_svc.frontend.rpc.status import Refusal

MODEL = Path(__file__).parents[4] / "gpu_worker/bundled/model/tokenizer.json"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|call|>", "<|message|>"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("get-weather", WEATHER, True), Tool("now", NOTHING, True))


def compact(schema: Mapping[str, Any]) -> tuple[str, bool]:
    return json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}), False


THINK = ReasoningFormat(open="<think>", close="</think>", after="\n\n")
BARE = {"call_begin": '{"name": "', "call_end": "}"}
JSON = {"middle": '", "arguments": '}
FORMATS = {
    "hermes": CallFormat(
        call_begin='<tool_call>\n{"name": "', call_end="}\n</tool_call>", separator="\n", trigger="<tool_call>", **JSON
    ),
    "list": CallFormat(
        calls_begin="[TOOL_CALLS][", calls_end="]", separator=", ", trigger="[TOOL_CALLS]", **BARE, **JSON
    ),
    "bare": CallFormat(separator="; ", trigger='{"name"', **BARE, **JSON),
    "outside": CallFormat(
        call_begin="to=functions.", middle=" json<|message|>", call_end="<|call|>", trigger="to=functions."
    ),
    "tagged": CallFormat(
        call_begin="<tool_call>\n<function=",
        middle=">\n",
        call_end="</function>\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
        tagged=TaggedArguments(before_name="<parameter=", after_name=">\n", after_value="\n</parameter>\n"),
    ),
}


TOKENIZER = Tokenizer.from_file(str(MODEL))
TOKENIZER.add_special_tokens(MARKS)
IDS = {text: TOKENIZER.token_to_id(text) for text in MARKS}
EOS = TOKENIZER.token_to_id("<|endoftext|>")
LL_TOKENIZER = LLTokenizer(TOKENIZER.to_str(), n_vocab=TOKENIZER.get_vocab_size(), eos_token=EOS)


def _form(name: str) -> AnswerFormat:
    return AnswerFormat(calls=FORMATS[name], reasoning=THINK, marks=IDS, write_schema=compact)


def _grammar(
    form: str | AnswerFormat,
    calls: Calls,
    tools: tuple[Tool, ...] = TOOLS,
    prefix: str = "",
    content: str | None = None,
    loose: Sequence[str] = (),
) -> str:
    form = _form(form) if isinstance(form, str) else form
    grammar = answer_grammar(Choice(tools, calls), form, prefix, content=content, loose=loose)
    assert grammar is not None
    return grammar


def _accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LL_TOKENIZER, grammar)
    assert not matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def _random_answer(grammar: str, seed: int) -> str | None:
    """Returns the text of a random walk, or None if it does not end within 400 tokens.

    Reasoning and free text would go on for long, so half of the time a mark or the end is taken where the mask has one.
    """
    draw, matcher, ids = random.Random(seed), LLMatcher(LL_TOKENIZER, grammar), list[int]()
    ends = {EOS, *IDS.values()}
    assert not matcher.get_error()
    for _ in range(400):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        marks = sorted(ends.intersection(allowed))
        token = draw.choice(marks if marks and draw.random() < 0.5 else allowed)
        if token == EOS:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            return TOKENIZER.decode(ids, skip_special_tokens=False)
    return None


def _read_calls(name: str, answer: str) -> list[tuple[str, object]]:
    """The calls of an answer, by plain searches for what the format writes around them."""
    if name == "list":
        lists = [json.JSONDecoder().raw_decode(part)[0] for part in answer.split("[TOOL_CALLS]")[1:]]
        return [(call["name"], call["arguments"]) for calls in lists for call in calls]
    if name == "outside":
        found = re.findall(r"to=functions\.([\w.-]+) json<\|message\|>(.*?)<\|call\|>", answer, re.DOTALL)
        return [(tool, json.loads(arguments)) for tool, arguments in found]
    if name == "bare":
        calls, at = list[tuple[str, object]](), answer.find('{"name"')
        while at >= 0:
            call, end = json.JSONDecoder().raw_decode(answer, at)
            calls.append((call["name"], call["arguments"]))
            at = answer.find('{"name"', end)
        return calls
    bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", answer, re.DOTALL)
    if name == "hermes":
        return [(json.loads(body)["name"], json.loads(body)["arguments"]) for body in bodies]
    calls = []
    for body in bodies:
        tool = re.match(r"<function=([\w.-]+)>", body)
        assert tool is not None
        given = re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>", body, re.DOTALL)
        calls.append((tool[1], {key: int(value) if key == "days" else value for key, value in given}))
    return calls


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", [Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE, Calls.ANY, Calls.AT_MOST_ONE])
def test_every_call_of_an_answer_is_whole_and_valid(name: str, calls: Calls) -> None:
    grammar, numbers = _grammar(name, calls), list[int]()
    for seed in range(12):
        answer = _random_answer(grammar, seed)
        if answer is None:
            continue
        found = _read_calls(name, answer.split("</think>")[-1])
        numbers.append(len(found))
        for tool, arguments in found:
            schema = {tool.name: tool.parameters for tool in TOOLS}[tool]
            jsonschema.validate(arguments, schema)
    assert len(numbers) >= 3
    if calls in (Calls.AT_LEAST_ONE, Calls.EXACTLY_ONE):
        assert min(numbers) >= 1
    if calls in (Calls.EXACTLY_ONE, Calls.AT_MOST_ONE):
        assert max(numbers) <= 1


CALL = '<tool_call>\n{"name": "get-weather", "arguments": {"city":"Rome","unit":"C"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get-weather", "arguments": {"city":"Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("calls", "text", "is_accepted"),
    [
        (Calls.AT_LEAST_ONE, CALL, True),
        (Calls.AT_LEAST_ONE, f"{CALL}\n{CALL}", True),
        (Calls.AT_LEAST_ONE, "Sure: " + CALL, False),
        (Calls.AT_LEAST_ONE, WRONG, False),
        (Calls.AT_LEAST_ONE, "<think>Rome, then.</think>\n\n" + CALL, True),
        (Calls.EXACTLY_ONE, f"{CALL}\n{CALL}", False),
        (Calls.ANY, "No tool is needed.", True),
        (Calls.ANY, f"Sure: {CALL}\n{CALL} Done.", True),
        (Calls.ANY, "Sure: " + WRONG, False),
        (Calls.AT_MOST_ONE, "Sure: " + CALL, True),
        (Calls.AT_MOST_ONE, f"{CALL}\n{CALL}", False),
    ],
)
def test_calls_are_accepted_as_often_as_the_choice_allows(calls: Calls, text: str, is_accepted: bool) -> None:
    assert _accepts(_grammar("hermes", calls), text) is is_accepted


@pytest.mark.parametrize(
    ("prefix", "text", "is_accepted"),
    [
        # The template has opened the reasoning, or closed it at once.
        ("<think>\n", "Rome.</think>\n" + CALL, True),
        ("<think>\n", CALL, False),
        ("<think>\n\n</think>\n\n", CALL, True),
        ("<think>\n\n</think>\n\n", "<think>x</think>" + CALL, False),
        ("", CALL, True),
    ],
)
def test_reasoning_goes_on_where_the_prompt_left_it(prefix: str, text: str, is_accepted: bool) -> None:
    assert _accepts(_grammar("hermes", Calls.EXACTLY_ONE, prefix=prefix), text) is is_accepted


def test_a_model_decides_freely_over_tools_that_are_not_strict() -> None:
    tools = tuple(Tool(tool.name, tool.parameters, False) for tool in TOOLS)
    for choice in (Choice(tools, Calls.ANY), Choice((), Calls.NONE)):
        assert answer_grammar(choice, _form("hermes"), "", content=None) is None
    # With one strict tool, calls of the others have any arguments.
    mixed = _grammar("hermes", Calls.ANY, (TOOLS[0], tools[1]))
    assert _accepts(mixed, '<tool_call>\n{"name": "now", "arguments": {"zone":3}}\n</tool_call>')
    assert not _accepts(mixed, WRONG)


def test_arguments_are_any_object_where_a_loose_tool_has_a_schema_that_is_not_supported() -> None:
    tool = Tool("now", {"type": "object", "not": {}}, False)
    grammar = _grammar("hermes", Calls.EXACTLY_ONE, (tool,), loose=["now"])
    assert _accepts(grammar, '<tool_call>\n{"name": "now", "arguments": {"zone":3}}\n</tool_call>')


def test_marks_that_are_no_tokens_of_their_own_are_text() -> None:
    form = AnswerFormat(calls=FORMATS["bare"], reasoning=None, write_schema=compact)
    grammar = _grammar(form, Calls.ANY)
    assert _accepts(grammar, 'Sure: {"name": "now", "arguments": {}}; {"name": "now", "arguments": {}} Done.')
    assert not _accepts(grammar, 'Sure: {"name": "never", "arguments": {}}')


def test_references_of_a_tagged_argument_are_found() -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
    }
    grammar = _grammar("tagged", Calls.EXACTLY_ONE, (Tool("go", schema, True),))
    begin, end = "<tool_call>\n<function=go>\n<parameter=at>\n", "\n</parameter>\n</function>\n</tool_call>"
    assert _accepts(grammar, begin + '{"x":3}' + end)
    assert not _accepts(grammar, begin + '{"y":3}' + end)


END = "\n</parameter>\n"
HELD: dict[str, tuple[dict[str, object], list[str], list[str]]] = {
    "const": ({"const": "a/b"}, ["a/b"], ["a", ""]),
    "const of a string": ({"type": "string", "const": "ab"}, ["ab"], ["abc"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "a\nb", "äöüß"], ["a", "abcde"]),
    "least": ({"type": "string", "minLength": 2.0}, ["ab", "ab" * 60], ["a"]),
    "found": ({"type": "string", "pattern": "[0-9]/"}, ["7/", "a7/\nb"], ["7", ""]),
    "whole": ({"type": "string", "pattern": "^[a-z]{1,3}$"}, ["abc"], ["abcd", "7", "a7"]),
    "begin": ({"type": "string", "pattern": "^(a|b)"}, ["a", "bx\n"], ["xa"]),
    "end": ({"type": "string", "pattern": "(a|b)$"}, ["a", "xb"], ["ax"]),
    "escaped end": ({"type": "string", "pattern": "a\\$"}, ["a$", "xa$x"], ["a"]),
    "both": ({"type": "string", "pattern": "a|b", "maxLength": 2}, ["xa", "b"], ["xya", "xx"]),
    "enum": ({"enum": ["a", "b"]}, ["a", "b"], ["c"]),
}


@pytest.mark.parametrize("after", [END, "</think>", "\n</think>\n"])
@pytest.mark.parametrize("name", HELD)
def test_a_tagged_string_keeps_its_schema(name: str, after: str) -> None:
    schema, valid, invalid = HELD[name]
    form = FORMATS["tagged"]
    assert form.tagged is not None
    form = replace(form, tagged=replace(form.tagged, after_value=after))
    assert not why_not_held({"properties": {"a": schema}}, is_strict=True)
    tool = Tool("go", {"type": "object", "properties": {"a": schema}, "required": ["a"]}, True)
    made = _grammar(replace(_form("tagged"), calls=form, reasoning=None), Calls.EXACTLY_ONE, (tool,))
    begin, end = "<tool_call>\n<function=go>\n<parameter=a>\n", f"{after}</function>\n</tool_call>"
    assert [_accepts(made, begin + value + end) for value in valid] == [True] * len(valid)
    assert [_accepts(made, begin + value + end) for value in invalid] == [False] * len(invalid)
    # The first end is the end.
    assert not any(_accepts(made, begin + value + after + value + end) for value in valid)


@pytest.mark.parametrize(
    ("schema", "of_strict", "of_others"),
    [
        ({"type": "string", "format": "date"}, "the format 'date'", ""),
        ({"type": "string", "pattern": "a$|^b"}, *["the pattern 'a$|^b'"] * 2),
        ({"type": "string", "pattern": r"\bone\b"}, *["the pattern '\\\\bone\\\\b'"] * 2),
        ({"type": "integer", "format": "int32"}, "", ""),
    ],
)
def test_what_a_tagged_string_cannot_keep_is_named(schema: dict[str, object], of_strict: str, of_others: str) -> None:
    words = " of argument 'a' is not enforced where a model writes strings without quotes"
    for is_strict, why in ((True, of_strict), (False, of_others)):
        assert why_not_held({"properties": {"a": schema}}, is_strict=is_strict) == (why and why + words)


A_OR_B = json.dumps({"grammars": [{"lark_grammar": 'start: "a" | "b"'}]})
ONLY_A = json.dumps({"grammars": [{"json_schema": {"enum": ["a"]}}]})


@pytest.mark.parametrize(("content", "text"), [(A_OR_B, "a"), (ONLY_A, '"a"')])
def test_an_answer_under_a_constraint_may_begin_with_reasoning(content: str, text: str) -> None:
    grammar = _grammar("hermes", Calls.NONE, (), content=content)
    assert _accepts(grammar, "<think>well</think>\n\n" + text)
    assert _accepts(grammar, text)
    assert not _accepts(grammar, "well" + text)
    assert _grammar("hermes", Calls.NONE, (), "<think></think>", content) == content


def test_an_answer_under_a_constraint_may_call_tools_instead() -> None:
    grammar = _grammar("hermes", Calls.ANY, content=ONLY_A)
    assert _accepts(grammar, '"a"')
    assert _accepts(grammar, f"<think>well</think>\n\n{CALL}\n{CALL}")
    assert not _accepts(grammar, "Sure: " + CALL)
    assert not _accepts(grammar, "Sure.")


MARKED = AnswerFormat(
    calls=CallFormat(
        call_begin="[TOOL_CALLS]to=", middle=" json<|message|>", call_end="<|call|>", trigger="[TOOL_CALLS]to="
    ),
    reasoning=ReasoningFormat(open="[TOOL_CALLS]analysis<|message|>", close="<|call|>[TOOL_CALLS]assistant"),
    content_begin="[TOOL_CALLS]final<|message|>",
    marks=IDS,
    write_schema=compact,
)


@pytest.mark.parametrize(
    ("calls", "text", "is_accepted"),
    [
        (Calls.ANY, "[TOOL_CALLS]final<|message|>Hello.", True),
        (Calls.ANY, "Hello.", False),
        (Calls.ANY, "[TOOL_CALLS]to=now json<|message|>{}<|call|>", True),
        (
            Calls.EXACTLY_ONE,
            "[TOOL_CALLS]analysis<|message|>well<|call|>[TOOL_CALLS]assistant"
            "[TOOL_CALLS]to=now json<|message|>{}<|call|>",
            True,
        ),
        (Calls.EXACTLY_ONE, "[TOOL_CALLS]final<|message|>Hello.", False),
    ],
)
def test_a_family_that_marks_content_writes_its_marks(calls: Calls, text: str, is_accepted: bool) -> None:
    assert _accepts(_grammar(MARKED, calls), text) is is_accepted


def test_content_under_a_constraint_has_the_marks_of_its_family() -> None:
    begun = "[TOOL_CALLS]final<|message|>"
    grammar = _grammar(MARKED, Calls.NONE, (), content=ONLY_A)
    assert _accepts(grammar, f'{begun}"a"')
    assert not _accepts(grammar, '"a"')
    assert _grammar(MARKED, Calls.NONE, (), begun, ONLY_A) == ONLY_A


def test_text_up_to_a_mark_ends_with_what_stands_before_the_mark() -> None:
    rule = Marks(IDS).until("value", "\n/</think>")
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: value\n{rule}\n{TEXT}"}]})
    assert _accepts(grammar, "a\n/b\n/</think>")
    assert not _accepts(grammar, "a\n</think>")


def test_an_unknown_format_is_refused_only_where_calls_are_needed() -> None:
    form = AnswerFormat(calls=None, reasoning=None, write_schema=compact)
    with pytest.raises(Refusal, match="does not know how the served model writes calls"):
        answer_grammar(Choice(TOOLS, Calls.EXACTLY_ONE), form, "", content=None)
    assert answer_grammar(Choice((), Calls.NONE), form, "", content=None) is None
