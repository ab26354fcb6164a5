"""Which form answers have: by the literals of the chat template, by the checkpoint, by the operator; its data."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.frontend.__main__ import CannotServeError, read_answers
from scheduler_svc.frontend.chat.forms import (
    FOLDER,
    CallFormat,
    ReasoningFormat,
    ReasoningState,
    choose_form,
    read_form,
)
from scheduler_svc.frontend.chat.served import spec_of
from tests.scheduler_svc.frontend.chat.rig import TEMPLATE

TEMPLATES = Path(__file__).parent / "templates"
FAMILY_OF = {
    **dict.fromkeys(("chatml", "gemma3", "gemma_parts", "llama2", "parts_only", "phi3"), None),
    "deepseek_text": "deepseek-v3",
    "deepseek_v3": "deepseek-v3",
    "function_gemma": "function-gemma",
    "gemma_tools": "gemma4",
    "glm": "glm",
    "glm_parts": "glm",
    "granite": "call-list",
    "harmony": "harmony",
    "hermes": "hermes",
    "kimi_k2": "kimi-k2",
    "llama3": "llama3",
    "llama3_strict": "llama3",
    "mistral_args": "mistral-args",
    "mistral_list": "mistral-list",
    "mistral_strict": "mistral-args",
    "phi4_mini": "phi4",
    "qwen3_parts": "hermes",
    "qwen_xml": "qwen-xml",
}
OWN: dict[str, Any] = {"start_anchor": "x", "fields": {"content": {}}}


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_the_family_follows_from_the_chat_template(name: str) -> None:
    form = choose_form([(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")], "", None)
    assert (None if form is None else form.family) == FAMILY_OF[name]


def test_the_bundled_model_is_of_the_family_hermes() -> None:
    form = choose_form([TEMPLATE], "", None)
    assert form is not None and form.family == "hermes"
    assert form.calls is not None and form.reasoning is not None
    assert form.parts == ("reasoning", "tool_calls")


def test_every_named_template_counts() -> None:
    form = choose_form(["plain", '<tool_call>{"arguments"'], "", None)
    assert form is not None and form.family == "hermes"


def test_a_checkpoints_own_template_wins_and_keeps_the_familys_way_to_write_calls() -> None:
    form = choose_form([TEMPLATE], json.dumps(OWN), None)
    assert form is not None and form.template == OWN and form.parts == ()
    assert form.calls is not None
    alone = choose_form(["plain"], json.dumps(OWN), None)
    assert alone is not None and alone.template == OWN and alone.calls is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_the_operators_form_wins(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN), encoding)
    mine = read_answers(path)
    assert mine is not None and mine.family == "mine"
    assert choose_form([TEMPLATE], json.dumps({**OWN, "start_anchor": "y"}), mine) is mine
    path.write_text(json.dumps({"family": "f", "response_template": OWN, "reasoning": {"open": "<", "close": ">"}}))
    mine = read_answers(path)
    assert mine is not None and mine.reasoning is not None and mine.family == "f"
    assert read_answers(None) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not a JSON object"),
        ("[" * 100_000, "recursion"),
        ('{"families": 1}', "it has the unknown key 'families'"),
        ('{"response_template": {}}', "response_template must be an object with fields"),
        ('{"response_template": {"fields": {}}, "reasoning": {"open": "<"}}', "it must have after, close, open"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CannotServeError, match=f"response_template {path} cannot be used: .*{why}"):
        read_answers(path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_is_a_template_of_transformers(path: Path) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    form = read_form(value, path.stem)
    assert spec_of(json.dumps(form.template)).fields.keys() >= {"content"}
    assert form.family == value["family"] and value["literals"]


@pytest.mark.parametrize(
    ("field", "function"),
    [
        ({"open_pattern": r"\[(?P<name>\w+)\]"}, {"name": "{name}", "arguments": "{content}"}),
        ({"open_pattern": r"\[(?<name>\w+)\]"}, {"name": "{name}", "arguments": "{content}"}),
        ({"open": "["}, {"name": "{content.name}", "arguments": "{content.arguments}"}),
        ({"open": "[", "transform_each": True}, {"name": "{name}", "arguments": "{arguments}"}),
    ],
)
def test_the_usual_transform_follows_from_the_first_mark(field: dict[str, object], function: dict[str, str]) -> None:
    field = {**field, "close": "]", "content": "json"}
    form = read_form(
        {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": {**field, "transform": "usual"}}}, "f"
    )
    made = form.template["fields"]["tool_calls"]
    assert made == {**field, "transform": {"type": "function", "function": function}}
    assert spec_of(json.dumps(form.template)).fields["tool_calls"].transform["function"] == function


GIVEN = {"call_begin": "<c>", "middle": ":", "call_end": "</c>", "trigger": "<c>"}


def test_missing_parts_are_empty() -> None:
    form = CallFormat.from_json(GIVEN)
    assert (form.calls_begin, form.separator, form.calls_end, form.tagged) == ("", "", "", None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trigger": "x"}, "trigger is 'x', which does not begin a call"),
        ({"trigger": ""}, "trigger is ''"),
        ({"middle": 3}, "middle is 3, not a string"),
        ({"tagged": {"before_name": "<"}}, "it has before_name; it must have after_name, after_value, before_name"),
        ({"middel": ""}, "middel"),
    ],
)
def test_a_wrong_description_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CallFormat.from_json({**GIVEN, **change})


@pytest.mark.parametrize(
    ("prefix", "state"),
    [
        ("", ReasoningState.MAY_BEGIN),
        ("\n", ReasoningState.MAY_BEGIN),
        ("<think>\n", ReasoningState.OPEN),
        ("<think>\nwell</think>\n", ReasoningState.OVER),
        # A caller that continues its own text has decided against reasoning.
        ("The answer", ReasoningState.OVER),
    ],
)
def test_the_prompt_tells_where_the_reasoning_is(prefix: str, state: ReasoningState) -> None:
    assert ReasoningFormat(open="<think>", close="</think>").state(prefix) is state
