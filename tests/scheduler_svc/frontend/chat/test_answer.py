"""Parsed answers of every family: as they were written, as Transformers parses them, and however they are cut."""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from scheduler_svc.frontend.chat import calls as chat_calls
from scheduler_svc.frontend.chat.answer import MAX_CALL_CHARS, AnswerParser, Parsed
from scheduler_svc.frontend.chat.calls import argument_types, call_id
from scheduler_svc.frontend.chat.forms import choose_form
from scheduler_svc.frontend.chat.served import spec_of
from tests.scheduler_svc.frontend.chat.answers import FAMILIES, Call, Family, hermes

# Text without marks and without their characters; with letters of two to four bytes.
WORDS = st.text(st.sampled_from("ab z.,\n'é€😀"), max_size=12)
VALUES = st.one_of(
    st.integers(-(10**6), 10**6),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.sampled_from(["k", "l"]), st.integers(0, 9), max_size=2),
)
STRINGS = st.text(st.sampled_from("ab \\é😀.,"), min_size=1, max_size=8).map(lambda text: f"s{text}s")


def calls_with(strings: st.SearchStrategy[str]) -> st.SearchStrategy[list[Call]]:
    args = st.dictionaries(st.sampled_from(["a", "b", "city"]), strings | VALUES, max_size=3)
    return st.lists(st.tuples(st.sampled_from(["f", "get_weather", "x.y-2"]), args), min_size=1, max_size=3)


@functools.cache
def hostile(family: Family) -> st.SearchStrategy[list[Call]]:
    """Calls; their strings have the family's own marks, quotation marks, escapes and control characters."""
    signs = [*'"\\\n\x03{}]aé', ", ", "}}", '"}}', "}\n", ' "', "\\u0041", '{"name": "f", ']
    text = st.lists(st.sampled_from([*family.marks, *signs]), max_size=6).map(lambda parts: f"s{''.join(parts)}s")
    return calls_with(text.filter(lambda text: not family.is_ended(text)))


def template_of(family: str) -> str:
    form = choose_form([FAMILIES[family].literals], "", None)
    assert form is not None and form.family == family
    return json.dumps(form.template)


def parser(family: str, prefix: str = "", *, types: Mapping[str, Any] | None = None, **more: Any) -> AnswerParser:
    more = {"ignores_calls": False, **more}
    return AnswerParser(
        spec_of(template_of(family)), prefix, argument_types=types or {}, request_id="r", sample_idx=0, **more
    )


def parsed(made: AnswerParser, pieces: Sequence[str], *, is_cut: bool = False) -> Parsed:
    whole = Parsed()
    for piece in pieces:
        whole.add(made.feed(piece))
    whole.add(made.finish(is_cut=is_cut))
    return whole


def both_ways(family: str, text: str, prefix: str = "", *, is_cut: bool = False, **more: Any) -> Parsed:
    """An answer in one piece, which is the same as letter by letter."""
    whole, letters = (parsed(parser(family, prefix, **more), each, is_cut=is_cut) for each in ([text], list(text)))
    shown, expected = ((each.content, each.reasoning, calls_text(each)) for each in (letters, whole))
    assert shown == expected
    return whole


def calls_of(whole: Parsed) -> list[Call]:
    """The calls, from their pieces as a caller joins them."""
    names, arguments = dict[int, str](), dict[int, str]()
    for piece in whole.calls:
        if piece.id:
            assert piece.idx == len(names) and piece.id == call_id("r", 0, piece.idx)
            names[piece.idx] = piece.name
        assert piece.idx == len(names) - 1
        arguments[piece.idx] = arguments.get(piece.idx, "") + piece.arguments
    return [(name, json.loads(arguments[idx])) for idx, name in names.items()]


def tools_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Tools; their arguments have the types of these calls' values."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties: dict[str, dict[str, Any]] = {}
    for name, args in calls:
        for key, value in args.items():
            properties.setdefault(name, {})[key] = {"type": kinds.get(type(value), "null")}
    return [{"function": {"name": name, "parameters": {"properties": found}}} for name, found in properties.items()]


PLACES = st.lists(st.integers(0, 1 << 16), max_size=12)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """The text in random pieces, some of them empty."""
    at = sorted(place % (len(text) + 1) for place in draw(PLACES))
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


@functools.cache
@st.composite
def written(draw: st.DrawFn, family: Family, is_hostile: bool = False) -> tuple[str, str, str, list[Call]]:
    """(text, reasoning, content, calls) of an answer in the order in which the family writes them."""
    some_calls = hostile(family) if is_hostile and draw(st.booleans()) else calls_with(STRINGS)
    reasoning = draw(WORDS) if family.reasoning is not None and draw(st.booleans()) else ""
    content, calls = draw(WORDS), draw(some_calls) if family.calls is not None and draw(st.booleans()) else []
    # Two calls of one tool with values of other types would need two schemas.
    calls = list({name: (name, args) for name, args in calls}.values())
    text = family.written([], reasoning) + family.content(content) + family.written(calls, "")
    return text, reasoning, content, calls


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(data=st.data())
def test_an_answer_is_parsed_as_it_was_written_however_it_is_cut(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    text, reasoning, content, calls = data.draw(written(family, True))
    tools = tools_of(calls)
    types = argument_types(tools) if family.is_tagged else {}
    whole = parsed(parser(name, types=types), [text])
    assert whole.reasoning == reasoning.strip()
    assert whole.content.strip() == content.strip()
    assert calls_of(whole) == calls
    pieces = parsed(parser(name, types=types), data.draw(cuts(text)))
    assert (pieces.reasoning, pieces.content) == (whole.reasoning, whole.content)
    assert calls_of(pieces) == calls


# End marks that no answer of `answers` has.
ENDS = ["</s>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|start|>assistant", "[TOOL_CALLS]f[ARGS]"]
CALLING = [name for name, family in FAMILIES.items() if family.calls is not None]


@pytest.mark.parametrize("name", CALLING)
def test_an_end_mark_inside_a_string_is_text(name: str) -> None:
    family = FAMILIES[name]
    for number, mark in enumerate((*family.marks, *ENDS, '"', "\\", '"}}', "\x03")):
        for place, value in enumerate((f"a{mark}b", f"a {mark}\n{mark}z", f'a"{mark}", "b": "', f"a\\{mark}\\")):
            if family.is_ended(value) or family.is_ended(mark):
                continue
            calls: list[Call] = [("f", {"k": "v", "b": value}), ("g", {"a": [mark], "n": {"o": mark}})]
            types = argument_types(tools_of(calls)) if family.is_tagged else {}
            before, after = family.content("Well "), "and then" if family.goes_on else ""
            text = before + family.written(calls, "") + after
            # Each mark letter by letter in one of its places.
            for pieces in ([text], list(text))[: 1 + (place == number % 4)]:
                whole = parsed(parser(name, types=types), pieces)
                assert calls_of(whole) == calls, text
                assert " ".join(whole.content.split()) == f"Well {after}".strip(), text


def assert_cut(name: str, before: str, calls: list[Call], num_kept: int, types: Mapping[str, Any]) -> Parsed:
    """An answer that ends within its calls shows nothing of them in the content, and the last one as far as it goes."""
    text = (before + FAMILIES[name].written(calls, ""))[:num_kept]
    found = parsed(parser(name, types=types), [text], is_cut=True)
    assert found.content.strip() == parsed(parser(name), [before]).content.strip(), text
    shown = calls_text(found)
    for idx, ((_, called, arguments), (tool, args)) in enumerate(zip(shown, calls, strict=False)):
        assert called == tool
        if idx < len(shown) - 1:
            assert json.loads(arguments) == args
        whole = [json.dumps(args, ensure_ascii=False, separators=each) for each in ((", ", ": "), (",", ":"))]
        assert any(each.startswith(arguments) for each in whole), (text, arguments)
    assert len(shown) <= len(calls)
    return found


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_is_cut_anywhere_is_an_incomplete_call(name: str) -> None:
    family = FAMILIES[name]
    weather: Call = ("get_weather", {"city": 'a" é\n', "n": [12], "b": True})
    calls: list[Call] = [weather, ("f", {"a": f"s{family.marks[:1]}s"})]
    types = argument_types(tools_of(calls)) if family.is_tagged else {}
    before = family.content("Well")
    length = len(before + family.written(calls, ""))
    seen = [calls_text(assert_cut(name, before, calls, end, types)) for end in range(len(before), length + 1)]
    # Calls only grow.
    for shorter, longer in itertools.pairwise(seen):
        assert len(shorter) <= len(longer)
    assert calls_of(parsed(parser(name, types=types), [before + family.written(calls, "")], is_cut=True)) == calls
    # A name is known before its arguments.
    assert ("get_weather", "") in [(call[1], call[2]) for each in seen for call in each] or name == "llama3"


def test_a_call_that_goes_astray_and_is_cut_shows_no_mark() -> None:
    text = 'x<tool_call>{"name": "f", "arguments": {"a": "b\n c"}}\n</tool_call>'
    for end in range(1, len(text) + 1):
        whole = both_ways("hermes", text[:end], is_cut=True)
        assert "<" not in whole.content and whole.content.startswith("x"), end


def test_an_object_that_begins_like_a_call_of_no_tool_is_content_where_it_is_cut() -> None:
    for tool_names, shown in ((("f",), '{"name": "Bob", '), (("Bob",), ""), ((), "")):
        whole = both_ways("llama3", '{"name": "Bob", ', is_cut=True, tool_names=frozenset(tool_names))
        assert whole.content == shown and calls_text(whole) == ([] if shown else [(0, "Bob", "")])


@pytest.mark.parametrize("tools", [("f",), ("f", "Bob"), ()])
def test_an_object_that_reads_like_a_call_of_no_tool_is_content(tools: tuple[str, ...]) -> None:
    """Where calls have no mark of their own. A call between marks is one whatever its name."""
    text = 'Here: {"name": "Bob", "parameters": {"age": 3}} ok'
    is_call = not tools or "Bob" in tools
    whole = both_ways("llama3", text, tool_names=frozenset(tools))
    assert calls_of(whole) == ([("Bob", {"age": 3})] if is_call else [])
    assert is_call or whole.content == text
    marked = both_ways("hermes", hermes("Bob", {}), tool_names=frozenset(tools))
    assert (marked.content, calls_of(marked)) == ("", [("Bob", {})])
    both = parsed(parser("llama3", tool_names=frozenset(("f",))), [f'{text[:-3]}\n{{"name": "f", "parameters": {{}}}}'])
    assert (both.content, calls_of(both)) == (text[:-3], [("f", {})])


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=15)
@given(data=st.data())
def test_a_cut_answer_does_not_depend_on_its_pieces(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    before, calls = family.content(data.draw(WORDS)), data.draw(hostile(family))
    calls = list({name: (name, args) for name, args in calls}.values())
    types = argument_types(tools_of(calls)) if family.is_tagged else {}
    text = before + family.written(calls, "")
    end = data.draw(st.integers(len(before), len(text)))
    whole = assert_cut(name, before, calls, end, types)
    pieces = parsed(parser(name, types=types), data.draw(cuts(text[:end])), is_cut=True)
    assert (pieces.content, calls_text(pieces)) == (whole.content, calls_text(whole))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(data=st.data())
def test_an_answer_is_parsed_as_by_transformers(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    text, _, _, calls = data.draw(written(family))
    tools = tools_of(calls) if family.is_tagged else None
    message = parse_response(text, json.loads(template_of(name)), prefix="", tools=tools)
    whole = parsed(parser(name, types=argument_types(tools or [])), data.draw(cuts(text)))
    assert whole.reasoning == message.get("reasoning_content", "")
    # White space between calls is an empty region there, with a line break before it.
    assert whole.content.strip() == message.get("content", "").strip()
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert calls_of(whole) == expected


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20)
@given(data=st.data())
def test_babble_of_marks_never_fails_and_does_not_depend_on_the_cuts(name: str, data: st.DataObject) -> None:
    """Marks in any order, with anything between: models that go astray, and callers that want it."""
    sample = FAMILIES[name].written([("f", {"a": "s"})])
    marks = [*re.findall(r"<[^<>]*>|\[[A-Z_/]+\]|[{}\[\]\",:]|\w+|\s", sample), " ", "{", "}", '"']
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=24)))
    at = data.draw(cuts(text))
    for is_cut in (False, True):
        whole, pieces = (parsed(parser(name), each, is_cut=is_cut) for each in ([text], at))
        found = (pieces.reasoning, pieces.content, calls_text(pieces))
        assert found == (whole.reasoning, whole.content, calls_text(whole))


def calls_text(whole: Parsed) -> list[tuple[int, str, str]]:
    """The calls, joined; arguments may be incomplete."""
    joined: dict[int, tuple[str, str]] = {}
    for piece in whole.calls:
        name, arguments = joined.get(piece.idx, ("", ""))
        joined[piece.idx] = (name + piece.name, arguments + piece.arguments)
    return [(idx, *found) for idx, found in joined.items()]


BROKEN = [
    "<tool_call>{broken</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>[]</tool_call>",
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "<tool_call>" + "[" * 3000 + "</tool_call>",
]


@pytest.mark.parametrize("call", BROKEN, ids=lambda call: call[:40])
def test_what_is_not_a_call_is_content_with_its_marks(call: str) -> None:
    whole = parsed(parser("hermes"), [f"Before {call} after.", hermes("f", {}), "end"])
    assert whole.content == f"Before {call} after.\nend"
    assert calls_of(whole) == [("f", {})]


ASTRAY = 'x<tool_call>{"name": "f", "arguments": {"a": '
# The text, the content, and the calls as far as they are shown.
EDGES: dict[str, tuple[str, str, list[tuple[int, str, str]]]] = {
    "cut off": ('Hm <tool_call>\n{"name": "f", "argum', 'Hm <tool_call>\n{"name": "f", "argum', []),
    "without the last mark": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n', "", [(0, "f", '{"a": 1}')]),
    # The rest of a call that goes astray is content.
    "no number": (f"{ASTRAY}NaN}}}}</tool_call>", "x\nNaN}}", [(0, "f", '{"a": ')]),
    "more": (f"{ASTRAY}1}} 2}}</tool_call>", "x\n2}", [(0, "f", '{"a": 1}')]),
    "no end of a string": (f'{ASTRAY}"b</tool_call>', "x", [(0, "f", '{"a": "b')]),
    "no word": (f"{ASTRAY}tru</tool_call>", "x\ntru", [(0, "f", '{"a": ')]),
    "a number with a zero": (f"{ASTRAY}01}}}}</tool_call>", "x\n01}}", [(0, "f", '{"a": ')]),
    "half of a surrogate pair": (
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "", [(0, "f", '{"a": "\\ud800"}')]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_a_call_that_is_not_whole_loses_no_text(name: str) -> None:
    text, content, calls = EDGES[name]
    whole = both_ways("hermes", text)
    assert (whole.content, calls_text(whole)) == (content, calls)


def test_a_long_call_is_shown_in_whole_and_a_region_too_long_for_one_is_content() -> None:
    def pieces(text: str) -> list[str]:
        return [text[at : at + 1000] for at in range(0, len(text), 1000)]

    args = {"a": "x" * 3 * MAX_CALL_CHARS}
    assert calls_of(parsed(parser("hermes"), pieces(hermes("f", args)))) == [("f", args)]
    text = '<tool_call>{"arguments": {"a": "' + "x" * MAX_CALL_CHARS + '"}, "name": "f"}</tool_call> end'
    whole = parsed(parser("hermes"), pieces(text))
    assert (whole.content, whole.calls) == (text, [])


def test_arguments_are_shown_while_they_are_written() -> None:
    made = parser("hermes")
    pieces = ["<tool_call>\n", '{"name": "f", "arguments": {"city": "Zür', "ich", '", "days": 1', "2}}", "\n"]
    seen = [made.feed(piece).calls for piece in pieces]
    fragments = [[call.arguments for call in calls] for calls in seen]
    assert fragments == [[], ['{"city": "Zür'], ["ich"], ['", "days": '], ["12}"], []]
    assert [call.name for calls in seen for call in calls] == ["f", "", "", ""]
    assert not made.feed("</tool_call>").calls and not made.finish().content


@pytest.mark.parametrize("letters", [("a", "%61"), ("~", "~0")])
def test_a_schema_is_read_once_in_however_many_ways_references_lead_to_it(
    letters: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_read = chat_calls._types, 0

    def counted(*args: Any) -> list[str]:
        nonlocal num_read
        num_read += 1
        return read(*args)

    monkeypatch.setattr(chat_calls, "_types", counted)
    references = [{"$ref": f"#/$defs/{''.join(parts)}"} for parts in itertools.product(letters, repeat=8)]
    wide = {"type": [f"type {number}" for number in range(1_000)], "anyOf": [{"type": "string"}] * 1_000}
    parameters = {"properties": {"a": {"anyOf": references}}, "$defs": {letters[0] * 8: wide}}
    types = argument_types([{"function": {"name": "f", "parameters": parameters}}])
    assert num_read < 2_000 and len(types["f"]["a"]["type"]) == 16


_ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}}}
_OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["qwen-xml", "glm"])
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"$ref": "#/$defs/Address"}, '{"street": "x"}', {"street": "x"}),
        ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, '{"street": "x"}', {"street": "x"}),
        ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Address"}], "default": {}}, '{"street": "x"}', {"street": "x"}),
        ({"$ref": "#/$defs/a~1b"}, "5", 5),
        ({"$ref": "#/%24defs/a~1b"}, "5", 5),
        ({"$ref": "#/$defs/wide/anyOf/1000"}, "5", 5),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "$defs/a~1b"}, "5", "5"),
        ({"$ref": "#/$defs/self"}, "5", "5"),
        # Without an end where each of its references is followed again.
        ({"$ref": "#/$defs/wide"}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["x", None]}, "null", None),
        ({"enum": ["x", None]}, '"x"', "x"),
        ({"enum": ["x", "y"]}, "x", "x"),
        ({"const": 3}, "3", 3),
        ({"const": True}, "true", True),
        # As a grammar has the model write it, and as the model does without one.
        (_OPTIONAL, '"Paris"', "Paris"),
        (_OPTIONAL, '"a\\n\\"b\\""', 'a\n"b"'),
        (_OPTIONAL, "Paris", "Paris"),
        (_OPTIONAL, '"', '"'),
        (_OPTIONAL, '"a" and "b"', '"a" and "b"'),
        ({"type": ["string", "null"]}, '"Paris"', "Paris"),
        ({}, '"Paris"', "Paris"),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "0123", "0123"),
        # What is written without quotes keeps those that it has.
        ({"type": "string"}, '"Paris"', '"Paris"'),
        ({"const": '"x"'}, '"x"', '"x"'),
    ],
)
def test_tagged_values_have_the_types_of_their_schemas(name: str, schema: Any, written: str, value: object) -> None:
    definitions = {"Address": _ADDRESS, "a/b": {"type": "integer"}, "self": {"$ref": "#/$defs/self"}}
    definitions["wide"] = {"anyOf": [{"$ref": "#/$defs/wide"}] * 1000 + [{"type": "integer"}]}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    types = argument_types([{"function": {"name": "f", "parameters": parameters}}])
    text = FAMILIES[name].written([("f", {"a": written})], "")
    assert calls_of(both_ways(name, text, types=types)) == [("f", {"a": value})]


CONTROLS = {"a": "if x:\n\treturn \x03", "b": "\r\n"}


@pytest.mark.parametrize("name", ["hermes", "harmony", "llama3", "deepseek-v3.1", "kimi-k2", "mistral-list", "phi4"])
def test_strings_with_raw_line_breaks_are_arguments(name: str) -> None:
    """Models write code like that; no JSON has control characters in a string."""
    escaped = json.dumps(CONTROLS)
    raw = escaped.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r").replace("\\u0003", "\x03")
    text = FAMILIES[name].written([("f", CONTROLS)], "").replace(escaped, raw)
    assert raw in text and raw != escaped
    whole = both_ways(name, text)
    assert (whole.content, calls_of(whole)) == ("", [("f", CONTROLS)])


def test_without_tools_calls_are_content() -> None:
    text = f"<think>r</think>{hermes('f', {})} x"
    whole = both_ways("hermes", text, ignores_calls=True)
    assert (whole.reasoning, whole.content, whole.calls) == ("r", f"{hermes('f', {})} x", [])


@pytest.mark.parametrize(
    ("prefix", "text", "content", "reasoning"),
    [
        ("", " Hello \n", " Hello \n", ""),
        ("<think>\n", "so\n</think>\n\nHello", "Hello", "so"),
        ("<think>\n\n</think>\n\n", "\nHello ", "Hello ", ""),
        ("Well, ", " then", " then", ""),
        ("a <", "b", "b", ""),
        ("a <thi", "nk>so</think>x", "\nx", "so"),
    ],
)
def test_the_prompts_part_is_not_part_of_the_answer(prefix: str, text: str, content: str, reasoning: str) -> None:
    whole = both_ways("hermes", text, prefix)
    assert (whole.content, whole.reasoning) == (content, reasoning)


SPACES = st.text(st.sampled_from("\n \t"), max_size=3)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(data=st.data(), before=SPACES, after=SPACES, words=st.text(st.sampled_from("ab."), min_size=1))
def test_white_space_is_the_constraints_or_goes(
    name: str, data: st.DataObject, before: str, after: str, words: str
) -> None:
    """The prompt has the marks of reasoning that is over already, or none."""
    family = FAMILIES[name]
    if name == "harmony":
        prefix = "<|channel|>final<|message|>"
    else:
        prefix = family.reasoning("") if family.reasoning is not None and data.draw(st.booleans()) else ""
    text = before + words + after
    pieces = data.draw(cuts(text))
    assert parsed(parser(name, prefix, has_constraint=True), pieces).content == text
    content = parsed(parser(name, prefix), pieces).content
    if prefix and name != "harmony":
        # At its end the answer is as the model wrote it.
        assert content == words + after
        message = parse_response(prefix + text, json.loads(template_of(name)), prefix="")
        assert content.rstrip() == message["content"]
    elif not prefix:
        assert content == text


_CALL = [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("<|channel|>commentary to=functions.f code", _CALL),
        ("<|channel|>commentary to=functions.f", _CALL),
        ("<|channel|>commentary to=f <|constrain|>json", _CALL),
        ("<|channel|>commentary to=functions.f  <|constrain|>json", _CALL),
        ("<|channel|>analysis to=functions.f code", _CALL),
        (" to=functions.f<|channel|>commentary code", _CALL),
        (" to=f <|channel|>analysis <|constrain|>json", _CALL),
        ("<|channel|>analysis", "reasoning"),
        ("<|channel|>analysis json", "reasoning"),
        ("<|channel|>final json", "content"),
        ("<|channel|>final <|constrain|>json", "content"),
        ("<|channel|>commentary", "content"),
        ("<|channel|>summary", "content"),
        ("<|channel|>", "content"),
        ("", "content"),
    ],
)
@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>so<|end|><|start|>assistant"])
def test_whatever_header_gpt_oss_writes_its_text_is_somewhere(before: str, header: str, expected: Any) -> None:
    whole = both_ways("harmony", f'{before}{header}<|message|>{{"a":1}}<|end|>')
    reasoning = "so" if before else ""
    if expected == _CALL:
        assert (whole.content, whole.reasoning, calls_of(whole)) == ("", reasoning, _CALL)
    else:
        shown = {"content": whole.content, "reasoning": whole.reasoning.removeprefix(reasoning).lstrip()}
        assert shown == {"content": "", "reasoning": "", expected: '{"a":1}'}
        assert not whole.calls


@pytest.mark.parametrize("text", ["Hello", "to=f: Hello", "Hello <|channel|>"])
def test_an_answer_without_marks_is_content_whatever_the_family(text: str) -> None:
    whole = both_ways("harmony", text, "<|start|>assistant")
    assert (whole.content, whole.reasoning, whole.calls) == (text, "", [])


def test_the_beginning_of_a_mark_that_the_end_cuts_off_is_no_answer() -> None:
    for cut in ("<|channel|>", "<|channel|>fin", "<|channel|>analysis<|mess", "<|channel|>commentary to=functions.f"):
        whole = both_ways("harmony", cut, is_cut=True)
        assert (whole.content, whole.reasoning) == ("", "")


def test_reasoning_is_known_while_it_runs() -> None:
    made = parser("hermes")
    states = [(made.feed(text), made.is_reasoning)[1] for text in ("<think>", "a", "</think>", "b")]
    assert states == [True, True, False, False]


def test_ids_of_calls_have_nine_letters_and_digits_and_differ() -> None:
    ids = {call_id(request, sample, call) for request in "ab" for sample in range(3) for call in range(5)}
    assert len(ids) == 30
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", each) for each in ids)
