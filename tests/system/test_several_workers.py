"""Two workers on one machine: both serve, both keep a prefix cache, and the loss of one costs no stream."""

import signal
from collections.abc import Iterator

import pytest

from tests.rigs.processes import Child, Rig
from tests.rigs.streams import Caller
from tests.system.asks import Ask, answer, random_asks, send

SHAPE = ("--page-size", "4", "--num-pages", "1024", "--max-rows", "16", "--max-length", "1024", "--token-budget", "128")
PACE = ("--step-ms", "2")


def worker(rig: Rig, caller: Caller) -> Child:
    """A second serving worker. One that has only joined is on probation, and gets no request."""
    child = rig.worker(*SHAPE, *PACE)
    child.wait_line("^joined")
    caller.wait_load(lambda load: load.workers == 2)
    return child


def two_of(rig: Rig) -> tuple[Child, Child, Caller]:
    """Two serving workers in the order of their joining, and a caller."""
    _, first, caller = rig.serve(*SHAPE, *PACE)
    return first, worker(rig, caller), caller


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.fixture(scope="module")
def two(shared_rig: Rig) -> tuple[Child, Child, Caller]:
    """Two workers that serve all tests of the module."""
    return two_of(shared_rig)


def long_asks(count: int, seed: int) -> list[Ask]:
    return random_asks(count, seed=seed, prompts=(1, 40), outputs=(40, 60))


def running(caller: Caller) -> dict[int, int]:
    """Running requests by the worker's pid."""
    return {one.pid: one.running for one in caller.load().per_worker}


def test_both_workers_serve_and_the_load_reports_both(two: tuple[Child, Child, Caller], shared_rig: Rig) -> None:
    first, second, caller = two
    asks = long_asks(16, seed=1)
    with shared_rig.slowed():
        streams = send(caller, asks, tokens=3)
        load = caller.load()
    each = {one.pid: one for one in load.per_worker}
    assert each.keys() == {first.pid, second.pid}
    assert load.workers == 2
    assert min(one.running for one in each.values()) >= 6
    assert load.running == sum(one.running for one in each.values()) == 16
    assert load.pages_total == sum(one.pages_total for one in each.values()) == 2 * 1023
    assert all(one.pages_used > 0 for one in each.values())
    streams.check()
    assert not any(streams.worker_changes())
    caller.wait_idle()


def test_a_prompt_is_routed_to_the_worker_that_cached_it(two: tuple[Child, Child, Caller]) -> None:
    _, _, caller = two
    prompts = [tuple(range(first, first + 81)) for first in (0, 100)]
    for hits in (0, 80, 80):
        for prompt in prompts:
            usage = answer(caller, Ask(prompt=prompt, max_new_tokens=3)).summary.usage
            assert usage.cached_prompt_tokens == hits
    caller.wait_idle()


def test_a_worker_with_another_attention_window_is_refused(two: tuple[Child, Child, Caller], shared_rig: Rig) -> None:
    first, second, caller = two
    identity = caller.model_info().identity
    other = shared_rig.worker(*SHAPE, "--identity", identity, "--window", "64")
    assert other.wait() == 3
    assert "the serving workers attend to all earlier tokens" in other.wait_line("^stopped (.*)").group(1)
    assert {one.pid for one in caller.load().per_worker} == {first.pid, second.pid}


def test_a_kill_under_sixteen_streams_moves_them_to_the_other_worker(rig: Rig) -> None:
    first, second, caller = two_of(rig)
    asks = long_asks(16, seed=2)
    with rig.slowed():
        streams = send(caller, asks, tokens=5)
        # None of its streams ends between the count and its death.
        second.signal(signal.SIGSTOP)
        theirs = running(caller)[second.pid]
        assert theirs >= 6
        second.kill()
    caller.wait_load(lambda load: load.workers == 1)
    streams.check()
    assert sum(streams.worker_changes()) == theirs
    again = worker(rig, caller)
    asks = long_asks(8, seed=3)
    with rig.slowed():
        streams = send(caller, asks, tokens=3)
        assert running(caller).keys() == {first.pid, again.pid}
        assert min(running(caller).values()) >= 3
    streams.check()
    caller.wait_idle()


def test_a_request_too_long_for_the_remaining_worker_waits_for_a_larger_one(rig: Rig) -> None:
    flags = ("--identity", "same", "--page-size", "4", "--num-pages", "256", "--max-rows", "8", *PACE)
    _, large, caller = rig.serve(*flags, "--max-length", "600")
    rig.worker(*flags, "--max-length", "100").wait_line("^joined")
    assert caller.model_info().max_length == 600
    long = Ask(prompt=(1, 2, 3), max_new_tokens=150)
    with rig.slowed():
        stream = caller.generate(long.request())
        stream.wait_tokens(5)
        large.kill()
    caller.wait_load(lambda load: load.workers == 1 and load.waiting == 1)
    # The small worker serves the requests that fit it.
    send(caller, random_asks(6, seed=5, prompts=(1, 30), outputs=(20, 60))).check()
    assert (caller.load().waiting, caller.load().running) == (1, 0)
    assert not stream.ended
    rig.worker(*flags, "--max-length", "600")
    long.check(stream.result())
    assert stream.transcript.summary.timing.worker_changes == 1
    caller.wait_idle()
