"""The conversation: what is sent, what is kept, and what is taken back."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem_client.cli.chat.session import Session
from tandem_client.types import ToolCall

CALL = ToolCall(id="a" * 9, name="weather", arguments='{"city": "Rom"}')
OTHER = ToolCall(id="b" * 9, name="time", arguments="{}")


def roles(session: Session) -> list[str]:
    return [message["role"] for message in session.messages]


def test_turns_follow_the_message_of_the_system() -> None:
    session = Session(system="Be brief.")
    assert session.say("hi")
    assert session.answered("hello", "hm", ())
    assert session.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "hm"},
    ]
    session.clear()
    assert roles(session) == ["system"] and session.num_turns == 0


def test_texts_after_calls_are_their_results() -> None:
    session = Session()
    session.say("weather and time?")
    session.answered("", "", (CALL, OTHER))
    assert session.pending_call == CALL
    assert not session.say("sunny")
    assert session.pending_call == OTHER
    assert session.say("noon")
    assert session.pending_call is None
    assert session.messages[2:] == [
        {"role": "tool", "content": "sunny", "tool_call_id": CALL.id, "name": "weather"},
        {"role": "tool", "content": "noon", "tool_call_id": OTHER.id, "name": "time"},
    ]
    # Without an answer the results can be given again.
    session.retract()
    assert session.pending_call == CALL and roles(session) == ["user", "assistant"]


def test_a_call_that_was_cut_off_is_dropped() -> None:
    session = Session()
    session.say("weather?")
    cut = ToolCall(id=OTHER.id, name="time", arguments='{"zo')
    assert session.answered("Look:", "", (CALL, cut))
    assert [call["id"] for call in session.messages[-1]["tool_calls"]] == [CALL.id]
    session.clear()
    session.say("weather?")
    assert not session.answered("", "thinking", (cut,))
    assert session.messages == []


def test_another_answer_takes_the_place_of_the_last_one() -> None:
    session = Session()
    assert not session.reopen()
    session.say("hi")
    session.answered("hello", "", ())
    assert session.reopen() and roles(session) == ["user"]
    # The new answer failed: the old one stays.
    session.retract()
    assert [message["content"] for message in session.messages] == ["hi", "hello"]
    session.reopen()
    session.answered("good day", "", ())
    assert [message["content"] for message in session.messages] == ["hi", "good day"]


def test_a_saved_conversation_goes_on_where_it_was() -> None:
    session = Session(system="s", settings={"temperature": 0.0})
    session.say("weather?")
    session.answered("", "", (CALL, OTHER))
    other = Session()
    other.restore(session.saved())
    assert other.messages == session.messages and other.system == "s"
    assert other.pending_call is not None and other.pending_call.name == "weather"
    other.say("sunny")
    other.say("noon")
    assert other.messages[-1]["tool_call_id"] == OTHER.id


def test_a_conversation_of_another_program_ends_with_an_answer() -> None:
    session = Session()
    session.restore({"messages": [{"role": "user", "content": "hi"}]})
    assert session.messages == []


@pytest.mark.parametrize(
    "saved", [3, {}, {"messages": 3}, {"messages": [{"content": "a"}]}, {"messages": [{"role": "user", "x": 1}]}]
)
def test_what_is_no_conversation_changes_nothing(saved: object) -> None:
    session = Session(system="s")
    session.say("hi")
    session.answered("hello", "", ())
    with pytest.raises((TypeError, ValueError)):
        session.restore(saved)
    assert roles(session) == ["system", "user", "assistant"]


class Talk(RuleBasedStateMachine):
    """In any order of events, what is sent is a conversation that templates accept."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session()
        self.asked = False

    @precondition(lambda self: not self.asked)
    @rule(text=st.text(max_size=3))
    def say(self, text: str) -> None:
        self.asked = self.session.say(text)

    @precondition(lambda self: self.asked)
    @rule(text=st.sampled_from(["", "a"]), calls=st.lists(st.sampled_from([CALL, OTHER]), unique=True, max_size=2))
    def answer(self, text: str, calls: list[ToolCall]) -> None:
        self.session.answered(text, "", calls)
        self.asked = False

    @precondition(lambda self: self.asked)
    @rule()
    def fail(self) -> None:
        self.session.retract()
        self.asked = False

    @precondition(lambda self: not self.asked)
    @rule()
    def again(self) -> None:
        self.asked = self.session.reopen()

    @precondition(lambda self: not self.asked)
    @rule()
    def save_and_load(self) -> None:
        half_answered = self.session.messages and self.session.messages[-1]["role"] != "assistant"
        before = self.session.messages
        self.session.restore(self.session.saved())
        assert half_answered or self.session.messages == before

    @invariant()
    def every_message_has_its_place(self) -> None:
        open_calls: list[str] = []
        last = ""
        for message in self.session.messages:
            role: Any = message["role"]
            if role == "tool":
                assert message["tool_call_id"] == open_calls.pop(0)
            else:
                assert not open_calls
                assert role != last
                open_calls = [call["id"] for call in message.get("tool_calls", ())]
            last = role
        pending = self.session.pending_call
        assert [pending.id] == open_calls[:1] if pending else not open_calls
        assert not self.asked or last in ("user", "tool")


TestTalk = Talk.TestCase
TestTalk.settings = settings(max_examples=40, stateful_step_count=30)
