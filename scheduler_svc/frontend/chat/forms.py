"""Owns which form the answers of the served model have: a response template of Transformers, and how calls are written.

A checkpoint may bring its own response template. Otherwise the form is chosen from the files in `response_templates` by
literals of the chat template; see the README there. Knows nothing of requests.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from scheduler_svc.frontend.chat.calls import CALLS_FIELD
from scheduler_svc.frontend.tools.call_format import CallFormat, ReasoningFormat

FOLDER = Path(__file__).parent / "response_templates"
# The names that response templates have for reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_KEYS = {"family", "literals", "response_template", "call", "reasoning", "content_begin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form of a model's answers. `family` names it in the log."""

    family: str
    # A response template of Transformers.
    template: Mapping[str, Any]
    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    # What stands before content; empty in most families.
    content_begin: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """What is parsed besides the content, as GetModelInfo tells it."""
        fields = self.template["fields"]
        reasoning = ("reasoning",) if any(name in fields for name in REASONING_FIELDS) else ()
        return (*reasoning, *(("tool_calls",) if CALLS_FIELD in fields else ()))


def read_form(value: object, name: str) -> AnswerForm:
    """The form in a file of ours, or of a bare response template of Transformers. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    given = cast(dict[str, Any], value)
    if "fields" in given:
        given = {"response_template": given}
    if unknown := sorted(given.keys() - _KEYS):
        raise ValueError(f"it has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    template = given.get("response_template")
    if not isinstance(template, dict) or not isinstance(cast(dict[str, Any], template).get("fields"), dict):
        raise ValueError("response_template must be an object with fields")
    call, reasoning = given.get("call"), given.get("reasoning")
    return AnswerForm(
        family=str(given.get("family", name)),
        template=cast(dict[str, Any], template),
        calls=None if call is None else CallFormat.from_json(call),
        reasoning=None if reasoning is None else ReasoningFormat.from_json(reasoning),
        content_begin=str(given.get("content_begin", "")),
    )


@functools.cache
def _table() -> tuple[tuple[tuple[tuple[str, ...], ...], AnswerForm], ...]:
    """The files in the order of their names, each with its literals."""
    table = list[tuple[tuple[tuple[str, ...], ...], AnswerForm]]()
    for path in sorted(FOLDER.glob("*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        table.append((tuple(tuple(every) for every in value["literals"]), read_form(value, path.stem)))
    return tuple(table)


def choose_form(templates: Sequence[str], own: str, override: AnswerForm | None) -> AnswerForm | None:
    """The form of a model with these chat templates; None if none is known.

    `own`: the checkpoint's response template as JSON, or empty. `override`: the operator's. Raises ValueError if the
    checkpoint's own one cannot be used.
    """
    if override is not None:
        return override
    text = "\n".join(templates)
    known = next((form for literals, form in _table() if any(_has_all(text, every) for every in literals)), None)
    if not own:
        return known
    template = read_form(json.loads(own), "checkpoint").template
    if known is None:
        return AnswerForm(family="checkpoint", template=template, calls=None, reasoning=None)
    return dataclasses.replace(known, family="checkpoint", template=template)


def _has_all(text: str, literals: Sequence[str]) -> bool:
    """Whether the text has every literal, and none that is written with a leading exclamation mark."""
    return all((literal[1:] not in text) if re.match(r"!.", literal) else (literal in text) for literal in literals)
