"""Owns where JSON stands in an answer, in the words that the worker reads (`gpu_worker/constraints/places.py`). Pure.

JSON stands in calls, and in content under a schema. Reasoning, free text and values that are texts are not JSON,
whatever braces they have.
"""

from collections.abc import Collection
from typing import Any

from scheduler_svc.frontend.tools.call_format import CallFormat, ReasoningFormat, ReasoningState
from scheduler_svc.frontend.tools.marks import Marks

# [mark, next state, JSON that the mark has]
Step = list[Any]


def braces(state: int) -> list[Step]:
    """JSON wherever a brace is opened; `state` follows."""
    return [[[brace], state, brace] for brace in "{["]


# Of an output that is JSON.
ONLY_JSON = [braces(0)]


def places_of(
    marks: Marks,
    reasoning: ReasoningFormat | None,
    state: ReasoningState,
    calls: CallFormat | None,
    *,
    has_json_content: bool,
    json_values: Collection[str],
) -> list[list[Step]]:
    """The states of an answer. `json_values`: the tagged arguments whose values are JSON."""
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
            states += _tagged(marks, calls, states[-1], len(states) - 1, json_values)
    if reasoning is not None and state.may_begin:
        # It need not.
        states[0] += states[answer]
    return states


def _tagged(
    marks: Marks, calls: CallFormat, call: list[Step], number: int, json_values: Collection[str]
) -> list[list[Step]]:
    """The states of tagged arguments, which follow that of a call."""
    if (tagged := calls.tagged) is None:
        return []
    name, text, value = number + 1, number + 2, number + 3
    call.append([marks.parts(tagged.before_name), name, ""])
    begins = {key: marks.parts(f"{tagged.before_name}{key}{tagged.after_name}") for key in json_values}
    after = [marks.parts(tagged.after_value), number, ""]
    return [
        [[marks.parts(tagged.after_name), text, ""], *([begin, value, ""] for begin in begins.values())],
        [after],
        # The braces of a string are no JSON.
        [*braces(number), [['"'], text, ""], after],
    ]
