"""The data that describes how a family of models writes calls."""

import pytest

from scheduler_svc.frontend.chat.forms import CallFormat, ReasoningFormat, ReasoningState

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
    ("prefix", "may_begin", "is_open"),
    [
        ("", True, False),
        ("\n", True, False),
        ("<think>\n", False, True),
        ("<think>\nwell</think>\n", False, False),
        # A caller that continues its own text has decided against reasoning.
        ("The answer", False, False),
    ],
)
def test_the_prompt_tells_where_the_reasoning_is(prefix: str, may_begin: bool, is_open: bool) -> None:
    state = ReasoningFormat.from_json({"open": "<think>", "close": "</think>"}).state(prefix)
    assert state == ReasoningState(may_begin=may_begin, is_open=is_open)
