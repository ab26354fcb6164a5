"""A request that kills, hangs or fails its workers ends alone, after few deaths, and all others continue."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler_svc.core.messages import effects as fx
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.suspicion.deadly import KILLER, DeadlyFleet
from tests.scheduler_svc.core.world import greedy

SHAPE = Shape(page_size=4, num_pages=800, max_rows=64, max_length=120, token_budget=512, vocab_size=300)
ROWS = 64


# The fourth token of the first request of the test that uses it, and of no other one there.
LATE = 172


def submit_all(fleet: DeadlyFleet, poisoned: int, rows: int = ROWS, *, tokens: int = 40) -> dict[int, int]:
    """Submits requests, of which number `poisoned` kills its worker. Returns their streams by number."""
    prompts = {i: [i, i + 1, *([KILLER] if i == poisoned else [7])] for i in range(rows)}
    return {i: fleet.submit(prompt, max_new_tokens=tokens, ignore_eos=True) for i, prompt in prompts.items()}


def check(fleet: DeadlyFleet, culprit: int) -> None:
    """Checks that exactly this stream failed, and that all others equal the oracle."""
    failed = {number: stream.end.failure for number, stream in fleet.streams.items() if stream.end.failure}  # type: ignore
    assert list(failed) == [culprit]
    assert failed[culprit].code is fx.FailureCode.INTERNAL
    fleet.check_all_ended()
    assert fleet.core.suspects.handles == set()


@pytest.mark.parametrize(("poisoned", "restart_seconds"), [(0, 0.0), (1, 1.0), (31, 1.0), (32, 0.0), (63, 1.0)])
def test_one_culprit_among_64_causes_at_most_8_deaths(poisoned: int, restart_seconds: float) -> None:
    fleet = DeadlyFleet(SHAPE, restart_seconds=restart_seconds)
    streams = submit_all(fleet, poisoned)
    fleet.run_until_ended()
    check(fleet, streams[poisoned])
    assert len(fleet.deaths) <= 1 + 6 + 1
    # Every death but the first meets suspects only, half as many each time at most.
    sizes = [len(death.streams) for death in fleet.deaths]
    assert sizes[0] == ROWS and all(after <= max(1, before // 2) for before, after in pairwise(sizes))
    assert [death.streams for death in fleet.deaths[-2:]] == [(streams[poisoned],)] * 2
    failure = fleet.failure(streams[poisoned])
    assert "its worker died or hung 2 times while it ran alone at token 3" in failure.message
    assert fleet.core.lanes.crash_loop.cause(fleet.now) == ""


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 33])
def test_the_number_of_deaths_grows_with_the_logarithm_of_the_rows(rows: int) -> None:
    for poisoned in range(0, rows, max(1, rows // 4)):
        fleet = DeadlyFleet(SHAPE)
        streams = submit_all(fleet, poisoned, rows)
        fleet.run_until_ended()
        check(fleet, streams[poisoned])
        assert len(fleet.deaths) <= 1 + (rows - 1).bit_length() + 1


def test_a_request_that_kills_after_some_tokens_is_found_too() -> None:
    """The token is sampled and kills when it is computed, so two plans in flight leave the position open at first."""
    fleet = DeadlyFleet(SHAPE, faults=Faults(kill_token=LATE))
    streams = [fleet.submit([i, 7], max_new_tokens=12, ignore_eos=True) for i in range(20)]
    culprits = [number for number in streams if LATE in fleet.streams[number].expected(SHAPE).tokens[:-1]]
    assert culprits == [1]
    fleet.run_until_ended()
    for number in streams:
        expected = list(fleet.streams[number].expected(SHAPE).tokens)
        tokens, failure = fleet.streams[number].tokens, fleet.end(number).failure
        assert tokens == (expected[: expected.index(LATE) + 1] if number in culprits else expected)
        assert (failure is not None) == (number in culprits)
    assert len(fleet.deaths) <= 1 + 5 + 1


@pytest.mark.parametrize("poisoned", [0, 40, 63])
def test_batchmates_flow_again_after_eight_restarts(poisoned: int) -> None:
    fleet = DeadlyFleet(SHAPE, restart_seconds=1.0)
    others = [number for i, number in submit_all(fleet, poisoned, tokens=100).items() if i != poisoned]
    while not fleet.deaths:
        fleet.step()
    died_at = fleet.now
    while min(len(fleet.streams[number].tokens) for number in others) < 10:
        fleet.step()
    assert fleet.now - died_at < 8.5


def test_with_two_workers_the_other_one_goes_on_and_never_dies_twice() -> None:
    fleet = DeadlyFleet(SHAPE, workers=2)
    streams = submit_all(fleet, 20, tokens=100)
    progress: list[int] = []
    while fleet.end_of(streams[20]) is None:
        fleet.step()
        busy = {name: suspects_on(fleet, name) for name in fleet.workers}
        assert sum(map(bool, busy.values())) <= 1, "suspects run on two workers at once"
        progress.append(sum(len(stream.tokens) for stream in fleet.streams.values()))
    fleet.run_until_ended()
    check(fleet, streams[20])
    assert len(fleet.deaths) <= 8
    assert all(len(death.streams) <= 32 for death in fleet.deaths)


def suspects_on(fleet: DeadlyFleet, name: str) -> set[int]:
    """Returns the suspects in the worker's plans in flight, which contain no other requests then."""
    lane = fleet.lane_of(name)
    found = {handle for record in lane.in_flight for handle in record.handles.tolist()}
    suspects = found & fleet.core.suspects.handles
    assert not suspects or suspects == found, "a suspect shares a plan"
    return suspects


def test_other_requests_leave_the_lane_of_a_repeated_trial() -> None:
    fleet = DeadlyFleet(SHAPE, workers=2, restart_seconds=0.2)
    streams = submit_all(fleet, 20, tokens=100)
    while len(fleet.deaths) < 2:
        fleet.step()
    while fleet.end_of(streams[20]) is None:
        fleet.step()
        if len(fleet.workers) == 2:
            fleet.tick(0.001)
            for name in fleet.workers:
                if suspects_on(fleet, name) and fleet.core.suspects.is_repeated():
                    rows = fleet.lane_of(name).rows
                    handles = {request.handle for request in rows.requests_at(rows.seated())}
                    assert handles <= fleet.core.suspects.handles, "another request is on the lane of the trial"
    fleet.run_until_ended()
    ends = [fleet.end(number) for number in streams.values()]
    assert sum(end.stats.preemptions for end in ends) == fleet.core.counters.preemptions > 0


@pytest.mark.parametrize("num_kills", [80, pytest.param(500, marks=pytest.mark.long)])
def test_random_kills_under_64_streams_convict_nobody(num_kills: int) -> None:
    rng, fleet = random.Random(5), DeadlyFleet(SHAPE, workers=3, restart_seconds=0.02)
    numbers: list[int] = []
    while len(fleet.deaths) < num_kills:
        for _ in range(ROWS - len(fleet.core.queue)):
            prompt = [rng.randrange(200) for _ in range(rng.randint(1, 20))]
            numbers.append(fleet.submit(prompt, max_new_tokens=rng.randint(1, 30), ignore_eos=True))
        fleet.step()
        working = [name for name, lane in fleet.core.lanes.items() if lane.in_flight]
        if working and rng.random() < 0.5:
            fleet.die(rng.choice(working))
    fleet.run_until_ended()
    assert all(fleet.end(number).failure is None for number in numbers)
    fleet.check_all_ended()
    assert len(numbers) > 100


def test_a_kill_in_the_middle_of_a_bisection_convicts_no_innocent() -> None:
    for seed in range(10):
        rng, fleet = random.Random(seed), DeadlyFleet(SHAPE, restart_seconds=0.05)
        streams = submit_all(fleet, 3, 16)
        while fleet.end_of(streams[3]) is None:
            fleet.step()
            working = [name for name, lane in fleet.core.lanes.items() if lane.in_flight]
            if working and rng.random() < 0.1:
                fleet.die(rng.choice(working))
        fleet.run_until_ended()
        check(fleet, streams[3])


def test_a_machine_on_which_every_worker_dies_convicts_nobody_and_is_a_crash_loop() -> None:
    fleet = DeadlyFleet(SHAPE, faults=Faults(kill_token=7))
    submit_all(fleet, 99, 16)
    for _ in range(10_000):
        fleet.step()
        if fleet.core.lanes.crash_loop.cause(fleet.now):
            break
    assert fleet.core.lanes.crash_loop.cause(fleet.now)
    assert all(stream.end is None for stream in fleet.streams.values())


def test_a_request_whose_step_fails_is_found_while_the_worker_lives() -> None:
    fleet = DeadlyFleet(SHAPE, faults=Faults(fail_token=KILLER))
    streams = submit_all(fleet, 50)
    fleet.run_until_ended()
    check(fleet, streams[50])
    assert fleet.deaths == [] and list(fleet.workers) == ["a"]
    assert fleet.core.counters.resets <= 8
    failure = fleet.failure(streams[50])
    assert "its step failed 2 times while it ran alone" in failure.message


@pytest.mark.parametrize("culprits", [1, 3])
def test_failed_steps_of_new_requests_hold_the_running_ones_for_few_steps(culprits: int) -> None:
    """They are cleared in one trial from their cached pages. This worker needs 10 steps to compute all their tokens."""
    fleet = DeadlyFleet(replace(SHAPE, token_budget=96), faults=Faults(fail_token=KILLER))
    running = [fleet.submit([i, 7], max_new_tokens=100, ignore_eos=True) for i in range(16)]
    while min(len(fleet.streams[number].tokens) for number in running) < 60:
        fleet.step()
    new = [fleet.submit([100 + i, KILLER], max_new_tokens=20) for i in range(culprits)]
    seen, gaps, longest = [0] * len(running), [0] * len(running), 0
    while any(fleet.end_of(number) is None for number in new):
        fleet.step()
        counts = [len(fleet.streams[number].tokens) for number in running]
        gaps = [gap + 1 if now == before else 0 for gap, now, before in zip(gaps, counts, seen, strict=True)]
        seen, longest = counts, max(longest, *gaps)
    assert longest <= 6
    assert fleet.core.counters.resets <= 1 + 4 * culprits
    fleet.run_until_ended()
    assert [number for number in fleet.streams if fleet.end(number).failure] == new
    fleet.check_all_ended()


def test_a_request_whose_step_failed_alone_is_tried_again_without_cached_pages() -> None:
    """A cached page may be what makes the step fail."""
    prompt, num_steps = list(range(1, 30)), 4
    fleet = DeadlyFleet(SHAPE, faults=Faults(fail_steps=frozenset({num_steps + 1})))
    for _ in range(2):
        fleet.submit(prompt, max_new_tokens=num_steps, ignore_eos=True)
        fleet.run_until_ended()
    first, cached, again = [start.first_position for plan in fleet.plans_of["a"] for start in plan.starts]
    assert first == again == 0 < cached
    fleet.check_all_ended()


def test_a_hung_worker_makes_suspects() -> None:
    config = greedy(step_timeout_seconds=2.0)
    fleet = DeadlyFleet(SHAPE, config=config)
    numbers = [fleet.submit([i], max_new_tokens=4, ignore_eos=True) for i in range(4)]
    fleet.tick()
    fleet.tick(3.0)
    assert len(fleet.core.suspects) == 4
    assert fleet.core.lanes == {}
    fleet.workers.clear()
    fleet.join_as(SHAPE)
    fleet.run_until_ended()
    assert all(fleet.end(number).failure is None for number in numbers)
