"""Workers that die without a suspect make its own deaths doubtful, and a bounded number of doubts saves no culprit."""

from typing import Any, cast

from scheduler_svc.core.suspicion.suspects import LONE_DEATHS, MAX_DOUBTS, Suspect


def lone_deaths_until_conviction(others_between: int) -> int:
    """The number of deaths that convict a suspect alone, if `others_between` workers die without it between two."""
    suspect, losses = Suspect(cast(Any, None), 5), 0
    for number in range(1, 100):
        losses += 1
        if suspect.died_alone(5, number, losses):
            return number
        losses += others_between
    raise AssertionError("it is never convicted")


def test_two_lone_deaths_convict_if_no_worker_died_between_them() -> None:
    assert lone_deaths_until_conviction(0) == LONE_DEATHS == 2


def test_a_lone_death_does_not_count_if_another_worker_died_after_it() -> None:
    assert lone_deaths_until_conviction(1) == lone_deaths_until_conviction(9) == LONE_DEATHS + MAX_DOUBTS


def test_a_second_lone_death_counts_only_after_a_token_of_another_request() -> None:
    suspect = Suspect(cast(Any, None), 5)
    assert [suspect.died_alone(5, steps, losses) for losses, steps in enumerate((7, 7, 7, 8), start=1)] == [
        False, False, False, True,
    ]  # fmt: skip
