"""The table of phases: a transition in the table changes the phase, and any other raises and changes nothing."""

import itertools

import numpy as np
import pytest

from scheduler_svc.core.state.request import TRANSITIONS, Move, Phase, Request
from tests.scheduler_svc.core.bare import bare_request


def request(phase: Phase) -> Request:
    subject = bare_request(1, prompt=np.array([1, 2], np.int32), max_new_tokens=3)
    subject.phase = phase
    return subject


@pytest.mark.parametrize(("phase", "move"), list(itertools.product(Phase, Move)))
def test_every_phase_and_move_is_in_the_table_or_raises(phase: Phase, move: Move) -> None:
    subject = request(phase)
    if (phase, move) in TRANSITIONS:
        subject.move(move)
        assert subject.phase is TRANSITIONS[phase, move]
    else:
        with pytest.raises(AssertionError, match=f"{move} while {phase}"):
            subject.move(move)
        assert subject.phase is phase


def test_every_phase_can_end_and_ended_is_final() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is Phase.ENDED]
    assert {phase for phase, move in TRANSITIONS if move is Move.END} == {Phase.WAITING, Phase.RUNNING}
