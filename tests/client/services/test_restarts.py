"""The restart policy: the pause after each end of a child."""

import random

from tandem_client.services.restarts import GiveUp, RestartPolicy


class WholePause(random.Random):
    """Draws the upper bound, so that pauses are exact."""

    def uniform(self, a: float, b: float) -> float:
        return b


def decide(
    policy: RestartPolicy,
    at: float,
    *,
    status: int = 1,
    ever_served: bool = True,
    start_seconds: float = 0.0,
    served_seconds: float = 0.0,
) -> float | GiveUp:
    return policy.decide(
        at=at, status=status, ever_served=ever_served, start_seconds=start_seconds, served_seconds=served_seconds
    )


def test_pauses_double_up_to_30_seconds() -> None:
    policy = RestartPolicy(max_ends=None, rng=WholePause())
    pauses = [decide(policy, at=100 * n) for n in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_child_that_served_for_some_time_starts_again_at_once_and_the_pauses_begin_anew() -> None:
    policy = RestartPolicy(max_ends=None, rng=WholePause())
    served = (0, 2.9, 3, 3, 0, 0)
    assert [decide(policy, at=n, served_seconds=seconds) for n, seconds in enumerate(served)] == [0.5, 1, 0, 0, 0.5, 1]


def test_a_child_that_starts_slowly_must_serve_for_as_long() -> None:
    policy = RestartPolicy(max_ends=None, rng=WholePause())
    served = (20, 39.9, 40)
    pauses = [decide(policy, at=n, start_seconds=40, served_seconds=seconds) for n, seconds in enumerate(served)]
    assert pauses == [0.5, 1, 0]


def test_a_child_that_serves_and_ends_again_and_again_is_still_in_a_crash_loop() -> None:
    policy = RestartPolicy()
    assert [decide(policy, at=10 * n, served_seconds=5) for n in range(5)] == [
        0,
        0,
        0,
        0,
        GiveUp(", 5 times within 60 s; it is not started again"),
    ]


def test_jitter_makes_each_pause_between_half_and_all_of_its_length() -> None:
    pauses = [decide(RestartPolicy(rng=random.Random(seed)), at=0) for seed in range(200)]
    seconds = [pause for pause in pauses if isinstance(pause, float)]
    assert len(set(seconds)) == 200
    assert 0.25 <= min(seconds) < 0.27
    assert 0.48 < max(seconds) <= 0.5


def test_five_ends_within_a_minute_are_a_crash_loop() -> None:
    policy = RestartPolicy()
    assert all(isinstance(decide(policy, at=at), float) for at in (0, 15, 30, 45, 60, 75))
    assert decide(policy, at=76) == GiveUp(", 5 times within 60 s; it is not started again")


def test_a_policy_without_a_limit_restarts_a_crash_loop_for_ever() -> None:
    policy = RestartPolicy(max_ends=None)
    assert all(isinstance(decide(policy, at=0), float) for _ in range(50))


def test_wrong_settings_are_not_tried_again() -> None:
    decision = decide(RestartPolicy(max_ends=None), at=0, status=2, ever_served=False)
    assert decision == GiveUp("", wrong_settings=True)


def test_settings_that_served_once_are_tried_again() -> None:
    """For example, the port may be taken for a moment."""
    assert isinstance(decide(RestartPolicy(), at=0, status=2), float)


def test_a_child_that_never_served_is_not_started_again() -> None:
    assert decide(RestartPolicy(max_ends=None), at=0, ever_served=False) == GiveUp(" before it served")


def test_a_child_that_needs_no_service_is_tried_again_with_growing_pauses() -> None:
    policy = RestartPolicy(max_ends=None, needs_service=False, rng=WholePause())
    assert [decide(policy, at=n, status=2, ever_served=False) for n in range(3)] == [0.5, 1, 2]


def test_a_child_that_ended_in_order_starts_again_at_once_or_not_at_all() -> None:
    policy = RestartPolicy()
    assert [decide(policy, at=n, status=0) for n in range(9)] == [0.0] * 9
    assert decide(RestartPolicy(ends_in_order=True), at=0, status=0) == GiveUp(" because it was drained", in_order=True)
