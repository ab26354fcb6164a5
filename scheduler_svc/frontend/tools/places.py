"""Owns where JSON stands in an answer, in the words that the worker reads (`gpu_worker/constraints/places.py`). Pure.

JSON stands in calls, and in content under a schema. Reasoning, free text and values that are texts are not JSON,
whatever braces they have.
"""

from collections.abc import Collection, Mapping
from typing import Any

from scheduler_svc.frontend.tools.call_format import (
    ANY_NAME,
    CallFormat,
    ReasoningFormat,
    ReasoningState,
    TaggedArguments,
)
from scheduler_svc.frontend.tools.marks import Marks

# [mark, next state, JSON that the mark has]
Step = list[Any]
# The names of tagged arguments whose values are JSON, and of those whose values are text, by tool.
Values = Mapping[str, tuple[Collection[str], Collection[str]]]


def braces(state: int) -> list[Step]:
    """JSON wherever a brace or a quote is opened; `state` follows."""
    return [[[begin], state, begin] for begin in '{["']


# Of an output that is JSON.
ONLY_JSON = [braces(0)]


def places_of(
    marks: Marks,
    reasoning: ReasoningFormat | None,
    state: ReasoningState,
    calls: CallFormat | None,
    *,
    has_json_content: bool,
    values: Values,
) -> list[list[Step]]:
    """The states of an answer. `values`: the tagged arguments of each tool."""
    states = list[list[Step]]()
    if reasoning is not None and state.may_begin:
        states.append([[marks.parts(reasoning.open), 1, ""]])
    if reasoning is not None and (state.may_begin or state.is_open):
        states.append([[marks.parts(reasoning.close), len(states) + 1, ""]])
    answer = len(states)
    states.append(braces(answer) if has_json_content else [])
    if calls is not None:
        # A list of calls is JSON as a whole. Calls by themselves may follow the first one without its trigger.
        begins = [calls.trigger, *([calls.call_begin] if calls.calls_begin and "{" not in calls.call_begin else [])]
        for begin in begins:
            _, brace, rest = begin.partition("{")
            states[answer].append([marks.parts(begin), answer if brace else answer + 1, brace + rest])
        if calls.tagged is None and not calls.quote:
            states.append(braces(answer))
        else:
            states.append([[marks.parts(calls.call_end), answer, ""]])
            if calls.tagged is not None:
                _add_tagged(marks, calls, calls.tagged, states, answer, values)
    if reasoning is not None and state.may_begin:
        # It need not.
        states[0] += states[answer]
    return states


def _add_tagged(
    marks: Marks, calls: CallFormat, tagged: TaggedArguments, states: list[list[Step]], answer: int, values: Values
) -> None:
    """Adds the states of tagged arguments. Those of the first group follow in the state of a call, which is the last;
    there, too, the name of a tool of another group leads to its own."""
    call = states[-1]
    for idx, (tools, names) in enumerate(_groups(values)):
        if idx:
            begins = [marks.parts(f"{calls.call_begin}{tool}{calls.middle}") for tool in tools]
            call += [[begin, len(states), ""] for begin in begins]
            states.append([[marks.parts(calls.call_end), answer, ""]])
        own = len(states) - 1
        name, text, value = own + 1, own + 2, own + 3
        states[own].append([marks.parts(tagged.before_name), name, ""])
        begun = [marks.parts(f"{tagged.before_name}{key}{tagged.after_name}") for key in names]
        after = [marks.parts(tagged.after_value), own, ""]
        states += [
            [[marks.parts(tagged.after_name), text, ""], *([begin, value, ""] for begin in begun)],
            [after],
            [*braces(own), after],
        ]


def _groups(values: Values) -> list[tuple[list[str], list[str]]]:
    """Tools of which no argument is JSON in one and text in another, with their arguments that are JSON."""
    groups: list[tuple[list[str], set[str], set[str]]] = [([], set(), set())]
    for tool, (json_names, text_names) in values.items():
        for group in groups:
            if not (_meet(json_names, group[2]) or _meet(group[1], text_names)):
                break
        else:
            groups.append(group := ([], set(), set()))
        group[0].append(tool)
        group[1].update(json_names)
        group[2].update(text_names)
    return [(tools, sorted(json_names)) for tools, json_names, _ in groups]


def _meet(json_names: Collection[str], text_names: Collection[str]) -> bool:
    return bool(json_names) and (ANY_NAME in text_names or any(name in text_names for name in json_names))
