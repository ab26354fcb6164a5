"""Whether a process that ended is started again, and after which pause."""

import math
import random
from typing import Any

import pytest

from tandem_contract.processes import GiveUp, OnZero, Policy, Restart

LOOP = GiveUp(", 5 times within 60 s; it is not started again")


class WholePause(random.Random):
    """Draws the upper bound, so that pauses are exact."""

    def uniform(self, a: float, b: float) -> float:
        return b


def restart(**policy: object) -> Restart:
    return Restart(Policy(**policy), WholePause())  # type: ignore[arg-type]


def decide(one: Restart, **ended: Any) -> float | GiveUp:
    usual = {"at": 0.0, "status": 1, "ever_served": True, "start_seconds": 0.0, "served_seconds": 0.0}
    return one.decide(**usual | ended)


def test_pauses_double_up_to_the_last_one() -> None:
    one = restart()
    assert [decide(one, at=100 * n) for n in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    # A policy without a limit does so for ever.
    assert [decide(one, at=1000.0) for _ in range(50)] == [30] * 50
    one = restart(first_pause_seconds=0.1, last_pause_seconds=0.3, jitter=False)
    assert [decide(one) for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]


@pytest.mark.parametrize(("at_once", "pauses"), [(True, [0.5, 1, 0, 0, 0.5, 1]), (False, [0.5, 1, 0.5, 0.5, 1, 2])])
def test_a_process_that_served_for_some_time_begins_the_pauses_anew(at_once: bool, pauses: list[float]) -> None:
    one = restart(steady_at_once=at_once)
    served = (0, 2.9, 3, 3, 0, 0)
    assert [decide(one, at=n, served_seconds=seconds) for n, seconds in enumerate(served)] == pauses


def test_a_process_that_starts_slowly_must_serve_for_as_long() -> None:
    one = restart()
    served = (20, 39.9, 40)
    assert [decide(one, start_seconds=40, served_seconds=seconds) for seconds in served] == [0.5, 1, 0]


def test_a_process_that_does_not_tell_when_it_serves_is_steady_by_its_age() -> None:
    one = restart(needs_service=False, each_alone=True, steady_from_start=True, steady_at_once=False)
    lived = (0, 2.9, 3, 3, 0, 0)
    pauses = [decide(one, ever_served=False, start_seconds=seconds) for seconds in lived]
    assert pauses == [0.5, 1, 0.5, 0.5, 1, 2]
    assert decide(one, ever_served=False, start_seconds=1.0, served_seconds=2.0) == 0.5
    assert decide(one, status=2, ever_served=False, start_seconds=9.0) == GiveUp("", wrong_settings=True)


def test_a_process_that_serves_and_ends_again_and_again_is_still_in_a_crash_loop() -> None:
    one = restart(max_ends=5)
    assert [decide(one, at=10 * n, served_seconds=5) for n in range(5)] == [0, 0, 0, 0, LOOP]


def test_jitter_makes_each_pause_between_half_and_all_of_its_length() -> None:
    pauses = [decide(Restart(Policy(), random.Random(seed))) for seed in range(200)]
    seconds = [pause for pause in pauses if isinstance(pause, float)]
    assert len(set(seconds)) == 200
    assert 0.25 <= min(seconds) < 0.27
    assert 0.48 < max(seconds) <= 0.5


def test_so_many_ends_within_the_window_are_a_crash_loop() -> None:
    one = restart(max_ends=5)
    assert all(isinstance(decide(one, at=at), float) for at in (0, 15, 30, 45, 60, 75))
    assert decide(one, at=76) == LOOP
    assert decide(restart(max_ends=1)) == GiveUp("; it is not started again")


def test_ends_in_a_row_are_counted_from_the_last_steady_process_on() -> None:
    one = restart(max_ends=3, window_seconds=math.inf)
    in_a_row = GiveUp(", 3 times in a row; it is not started again")
    assert [decide(one, at=1e6 * n) for n in range(3)][2] == in_a_row
    one = restart(max_ends=3, window_seconds=math.inf)
    served = (0, 0, 3, 0)
    assert all(isinstance(decide(one, at=n, served_seconds=seconds), float | int) for n, seconds in enumerate(served))
    assert decide(one, at=9) == in_a_row
    one = restart(max_ends=2, window_seconds=math.inf)
    assert [decide(one, status=status) for status in (1, 0, 1)] == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("policy", "ended", "then"),
    [
        ({}, {"status": 2, "ever_served": False}, GiveUp("", wrong_settings=True)),
        ({"needs_service": False}, {"status": 2, "ever_served": False}, GiveUp("", wrong_settings=True)),
        # For example, the port may be taken for a moment.
        ({}, {"status": 2}, 0.5),
        ({}, {"ever_served": False}, GiveUp(" before it served")),
        ({"on_zero": OnZero.WANTED}, {"status": 0}, GiveUp(" because it was drained", in_order=True)),
    ],
    ids=["wrong settings", "of no service", "settings that served", "never served", "drained"],
)
def test_what_follows_a_first_end(policy: dict[str, Any], ended: dict[str, Any], then: float | GiveUp) -> None:
    assert decide(restart(**policy), **ended) == then


def test_a_process_that_needs_no_service_is_tried_again_with_growing_pauses() -> None:
    one = restart(needs_service=False, final=frozenset())
    assert [decide(one, status=status, ever_served=False) for status in (2, 1, 0)] == [0.5, 1, 2]


def test_a_process_that_ended_in_order_starts_again_at_once_or_as_others() -> None:
    one = restart(max_ends=5)
    assert [decide(one, status=0) for _ in range(9)] == [0.0] * 9
    one = restart(on_zero=OnZero.CRASH)
    assert [decide(one, status=0) for _ in range(2)] == [0.5, 1]


def test_processes_that_are_judged_alone_say_nothing_of_each_other() -> None:
    one = restart(needs_service=False, each_alone=True)
    assert decide(one, status=2) == GiveUp("", wrong_settings=True)
    assert decide(one, status=2, served_seconds=9.0) == 0
    assert decide(one, status=0, ever_served=False) == 0
