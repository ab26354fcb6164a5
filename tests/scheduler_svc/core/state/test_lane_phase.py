"""The table of a lane's phases: a move in the table changes one phase, and any other raises and changes nothing."""

import itertools

import pytest

from scheduler_svc.core.state.lane_phase import LANE_TRANSITIONS, LaneMove, LanePhase, LanePhases

P = LanePhase
SEATS = (P.PROBATION, P.STANDBY_PROBATION, P.STANDBY, P.SERVING, P.REPLACED)
STAYS = (P.STAYING, P.DRAINING, P.HANDING_OVER, P.DISMISSED)
WEIGHTS = (P.OPEN, P.CLOSED, P.EMPTYING, P.LOADING)


def asked(phases: LanePhases) -> tuple[bool, ...]:
    return phases.on_probation, phases.counts, phases.serves, phases.stays, phases.may_plan, phases.may_start


@pytest.mark.parametrize("move", list(LaneMove))
def test_every_move_is_in_the_table_or_raises(move: LaneMove) -> None:
    for before in itertools.product(SEATS, STAYS, WEIGHTS):
        subject = LanePhases(*before)
        if any((phase, move) in LANE_TRANSITIONS for phase in before):
            subject.move(move)
            after = [LANE_TRANSITIONS.get((phase, move), phase) for phase in before]
            assert subject == LanePhases(*after)
            assert sum(phase is not to for phase, to in zip(before, after, strict=True)) == 1
        else:
            with pytest.raises(AssertionError, match=f"^{move} while {', '.join(before)}$"):
                subject.move(move)
            assert subject == LanePhases(*before)


def test_each_phase_belongs_to_one_of_the_three_and_is_reached() -> None:
    assert sorted([*SEATS, *STAYS, *WEIGHTS]) == sorted(LanePhase)
    for part in (SEATS, STAYS, WEIGHTS):
        assert {to for (phase, _), to in LANE_TRANSITIONS.items() if phase in part} <= set(part)
    joined = {P.PROBATION, P.STANDBY_PROBATION, P.STAYING, P.OPEN}
    assert joined | set(LANE_TRANSITIONS.values()) == set(LanePhase)


@pytest.mark.parametrize(
    ("phases", "on_probation", "counts", "serves", "stays", "may_plan", "may_start"),
    [
        # Its first plan; no request starts.
        ((P.PROBATION, P.STAYING, P.OPEN), True, True, False, True, True, False),
        ((P.STANDBY_PROBATION, P.STAYING, P.OPEN), True, False, False, True, True, False),
        ((P.PROBATION, P.STAYING, P.EMPTYING), True, True, False, True, False, False),
        ((P.PROBATION, P.DISMISSED, P.OPEN), True, True, False, False, False, False),
        ((P.STANDBY, P.STAYING, P.OPEN), False, False, False, True, False, False),
        ((P.STANDBY, P.STAYING, P.LOADING), False, False, False, True, False, False),
        ((P.SERVING, P.STAYING, P.OPEN), False, True, True, True, True, True),
        # Its rows run, and none starts.
        ((P.SERVING, P.STAYING, P.CLOSED), False, True, True, True, True, False),
        ((P.SERVING, P.STAYING, P.EMPTYING), False, True, True, True, False, False),
        ((P.SERVING, P.STAYING, P.LOADING), False, True, True, True, False, False),
        ((P.SERVING, P.DRAINING, P.OPEN), False, True, True, False, True, False),
        ((P.REPLACED, P.DRAINING, P.OPEN), False, True, True, False, True, False),
        # It loads no more, so its rows go on.
        ((P.SERVING, P.DRAINING, P.EMPTYING), False, True, True, False, True, False),
        ((P.SERVING, P.DRAINING, P.LOADING), False, True, True, False, False, False),
        ((P.SERVING, P.HANDING_OVER, P.OPEN), False, True, True, False, False, False),
        ((P.SERVING, P.DISMISSED, P.OPEN), False, True, True, False, False, False),
        ((P.STANDBY, P.DRAINING, P.OPEN), False, False, False, False, False, False),
    ],
)
def test_what_is_asked_of_a_lane_follows_from_its_phases(
    phases: tuple[LanePhase, LanePhase, LanePhase],
    on_probation: bool,
    counts: bool,
    serves: bool,
    stays: bool,
    may_plan: bool,
    may_start: bool,
) -> None:
    assert asked(LanePhases(*phases)) == (on_probation, counts, serves, stays, may_plan, may_start)
