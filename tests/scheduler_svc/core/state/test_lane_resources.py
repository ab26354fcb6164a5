"""The states of a resource on a lane: a move in the table changes the state, any other raises and changes nothing."""

import itertools
from collections.abc import Callable

import pytest

from scheduler_svc.core.messages.resources import CONSTRAINT, Need
from scheduler_svc.core.state.lane_resources import TRANSITIONS, LaneResources, Move, State

NEED = Need(CONSTRAINT, b"h" * 32)
# How a resource gets into each state.
WAYS: dict[State, tuple[Move, ...]] = {
    State.DROPPED: (),
    State.WANTED: (Move.WANT,),
    State.PREPARING: (Move.WANT, Move.SEND),
    State.READY: (Move.WANT, Move.SEND, Move.PREPARE),
    State.UNSURE: (Move.WANT, Move.SEND, Move.PREPARE, Move.RESET),
}


@pytest.mark.parametrize(("state", "move"), list(itertools.product(State, Move)))
def test_every_state_and_move_is_in_the_table_or_raises(state: State, move: Move) -> None:
    subject = LaneResources()
    for step in WAYS[state]:
        subject.move(NEED, step)
    assert subject.state(NEED) is state
    if (state, move) in TRANSITIONS:
        subject.move(NEED, move)
        assert subject.state(NEED) is TRANSITIONS[state, move]
    else:
        with pytest.raises(AssertionError, match=f"{move} while {state}"):
            subject.move(NEED, move)
        assert subject.state(NEED) is state


ACTS: dict[Move, Callable[[LaneResources], object]] = {
    Move.WANT: lambda lane: lane.want(NEED),
    Move.SEND: lambda lane: lane.take_wanted(0.0),
    Move.PREPARE: lambda lane: lane.answered(NEED, ok=True),
    Move.FAIL: lambda lane: lane.answered(NEED, ok=False),
    Move.RESET: lambda lane: lane.reset(),
    Move.DROP: lambda lane: (lane.unused(NEED, 1), lane.take_drops(1)),
}


@pytest.mark.parametrize(("state", "move"), list(itertools.product(State, Move)))
def test_what_happens_to_a_lane_makes_exactly_the_moves_of_the_table(state: State, move: Move) -> None:
    subject = LaneResources()
    for step in WAYS[state]:
        ACTS[step](subject)
    assert subject.state(NEED) is state
    ACTS[move](subject)
    assert subject.state(NEED) is TRANSITIONS.get((state, move), state)
