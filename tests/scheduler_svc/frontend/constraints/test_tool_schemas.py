"""Schemas of tools that cannot be enforced: a loose tool takes any object with a warning, a strict one is refused.

Through a front end, with the process that tries grammars.
"""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import chat_pb2, inference_pb2
from tandem.v1 import constraint_pb2 as pb

from scheduler_svc.frontend.constraints import grammar as grammar_module
from scheduler_svc.frontend.constraints.door import MAX_WARNINGS
from scheduler_svc.frontend.servicer import MAX_WARNING_CHARS
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.chat.rig import chat_state, user
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, served, service

GOOD = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}


def of(schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


# Each with what the reason of the refusal has in it.
BROKEN: dict[str, tuple[Any, str]] = {
    "lookahead": (of({"type": "string", "pattern": "^(?!x).*$"}), "lookaround"),
    "format": (of({"type": "string", "format": "idn-hostname"}), "format"),
    "overlapping oneOf": (of({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
    "unsatisfiable": (of({"type": "integer", "minimum": 5, "maximum": 3}), "nsatisfiable"),
    "allOf of nothing": (of({"allOf": [{"type": "string"}, {"type": "integer"}]}), "nsatisfiable"),
    "keyword": (of({"not": {"type": "string"}}), "not"),
    "no target": (of({"$ref": "#/nope"}), "nope"),
    "other server": (of({"$ref": "http://x/y"}), "x/y"),
    "unknown type": (of({"type": "int"}), "int"),
    "unknown type of all": ({"type": "text"}, "'text'"),
    "number beyond any": (of({"type": "number", "minimum": 1e999}), ""),
    "list of properties": ({"type": "object", "properties": [1]}, "properties"),
    "repetition": (of({"type": "string", "pattern": "(x{200}){200}"}), "limit"),
    "large": (of({"enum": ["x" * 900 + str(i) for i in range(80)]}), "limit"),
}


def tool(name: str, schema: object, *, strict: bool = False) -> str:
    # As callers write it: json.dumps would write Infinity.
    text = json.dumps({"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}})
    return text.replace("Infinity", "1e999")


def request(tools: list[str], choice: Any = None, **fields: Any) -> inference_pb2.GenerateRequest:
    chat = chat_pb2.Chat(messages=[user("hi")], tools_json=tools, tool_choice=choice)
    return inference_pb2.GenerateRequest(chat=chat, **fields)


REQUIRED = chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED)


async def accepted(s: Service, asked: inference_pb2.GenerateRequest) -> tuple[str, list[str], str]:
    """(the grammar, the warnings in Accepted, the metadata) of a request that is served."""
    call = s.inference.Generate(asked, timeout=TIMEOUT_SECONDS)
    first, admitted = asyncio.ensure_future(call.read()), asyncio.ensure_future(s.core.admit())
    # A refusal comes before anything reaches the core.
    await asyncio.wait([first, admitted], return_when=asyncio.FIRST_COMPLETED)
    if first.done():
        admitted.cancel()
    message, metadata = (await first).accepted, dict(await call.initial_metadata())
    submit = await admitted
    call.cancel()
    await s.core.expect("cancel")
    return submit.constraint.decode(), list(message.warnings), str(metadata.get("x-tandem-warning", ""))


async def refused(s: Service, asked: inference_pb2.GenerateRequest) -> str:
    return await fails(s.inference.Generate(asked, timeout=TIMEOUT_SECONDS), Code.INVALID_ARGUMENT)


@served(state=chat_state(max_length=1 << 18))
async def test_a_loose_tool_never_fails_a_request_and_a_strict_one_is_refused_by_name(s: Service) -> None:
    for number, (name, (schema, reason)) in enumerate(BROKEN.items()):
        tools = [tool("good", GOOD), tool("bad", schema)]
        # Every second one with another choice.
        choice, other = ((REQUIRED, None), (chat_pb2.ToolChoice(name="bad"), REQUIRED))[number % 2]
        grammar, [warning], shown = await accepted(s, request(tools, choice))
        assert "'bad'" in warning and reason in warning and shown, (name, warning)
        # The other tool keeps its schema.
        assert ("days" in grammar) == (choice is REQUIRED), name
        words = await refused(s, request([tool("good", GOOD), tool("bad", schema, strict=True)], other))
        assert "chat.tools_json[1].function.parameters" in words or "tool 'bad' is strict" in words, words
        assert reason in words, (name, words)
        # The model decides, and nothing is enforced.
        assert await accepted(s, request(tools)) == ("", [], "")
        # A constraint stands beside it.
        regex = pb.Constraint(regex="[a-c]+")
        grammar, warnings, _ = await accepted(s, request(tools, constraint=regex))
        assert "[a-c]+" in grammar and not warnings


@served(state=chat_state(max_length=1 << 18))
async def test_the_warnings_of_many_tools_are_few_and_ascii(s: Service) -> None:
    tools = [tool(f"t{i}", of({"type": "string", "é\n" * 99: 1})) for i in range(MAX_WARNINGS + 3)]
    _, warnings, shown = await accepted(s, request(tools, REQUIRED))
    assert len(warnings) == MAX_WARNINGS + 1 and "3 other tools" in warnings[-1]
    assert shown.isascii() and shown.isprintable() and len(shown) == MAX_WARNING_CHARS


@served(state=chat_state(max_length=1 << 18))
async def test_tools_that_are_too_large_together_are_any_object(s: Service) -> None:
    tools = [tool(f"t{i}", of({"enum": ["x" * 500 + str(j) for j in range(40)]})) for i in range(4)]
    grammar, warnings, _ = await accepted(s, request(tools, REQUIRED))
    assert len(warnings) == 4 and len(grammar) < 10_000
    strict = [each.replace('"strict": false', '"strict": true') for each in tools]
    assert "limit" in await refused(s, request(strict, REQUIRED))


@pytest.mark.parametrize(("num_properties", "thread"), [(3, "MainThread"), (300, "text")])
@served(state=chat_state(max_length=1 << 18))
async def test_long_schemas_are_written_in_the_threads_of_texts(
    s: Service, monkeypatch: pytest.MonkeyPatch, num_properties: int, thread: str
) -> None:
    """They are bounded and shared between tenants; the event loop only writes what takes 1 ms."""
    wrote, written = list[str](), grammar_module._written

    def noted(*args: Any) -> Any:
        wrote.append(threading.current_thread().name)
        return written(*args)

    monkeypatch.setattr(grammar_module, "_written", noted)
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "null"} for i in range(num_properties)}}
    of_constraint = pb.Constraint(json_schema=json.dumps(schema))
    for asked in (
        request([tool("f", schema)], REQUIRED),
        request([tool("f", schema)], constraint=of_constraint),
        request([], constraint=of_constraint),
    ):
        wrote.clear()
        await accepted(s, asked)
        assert {name.partition("_")[0] for name in wrote} == {thread}


@served(state=chat_state(max_length=1 << 18))
async def test_a_constraint_beside_demanded_calls_is_checked_and_leaves_them_as_they_are(s: Service) -> None:
    tools = [tool("good", GOOD)]
    plain = await accepted(s, request(tools, REQUIRED))
    for constraint in (pb.Constraint(regex="[a-c]+"), pb.Constraint(lark='start: "a"')):
        assert await accepted(s, request(tools, REQUIRED, constraint=constraint)) == plain
    assert "constraint.regex" in await refused(s, request(tools, REQUIRED, constraint=pb.Constraint(regex="(")))


@pytest.mark.parametrize("template", ["{{ messages[0].content }}<think></think>", "{{ messages[0].content }}"])
async def test_a_family_whose_calls_are_unknown_serves_what_needs_no_call(tmp_path: Path, template: str) -> None:
    async with service(tmp_path, state=chat_state(template)) as s:
        words = "does not know how the served model writes calls"
        loose, strict = [tool("f", GOOD)], [tool("f", GOOD, strict=True)]
        assert await accepted(s, request(loose)) == ("", [], "")
        at_most_one = request(loose)
        at_most_one.chat.parallel_tool_calls = False
        assert await accepted(s, at_most_one) == ("", [], "")
        regex = pb.Constraint(regex="[a-c]+")
        grammar, warnings, _ = await accepted(s, request(loose, constraint=regex))
        assert "[a-c]+" in grammar and not warnings
        assert words in await refused(s, request(loose, REQUIRED))
        assert "tool 'f' is strict" in await refused(s, request(strict))
