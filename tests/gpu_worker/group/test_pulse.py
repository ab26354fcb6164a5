"""Signs of life between two threads that stand for two ranks, with shorter times."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import zmq

from gpu_worker.group import pulse
from gpu_worker.group.pulse import Pulse
from gpu_worker.group.words import name_of
from gpu_worker.process.ranks import Ranks

LEADER, FOLLOWER = (Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in (0, 1))
REMOTE_LEADER, REMOTE_FOLLOWER = (Ranks(rank=rank, size=2, local_rank=0, local_size=1) for rank in (0, 1))


class Ended:
    """Notes why a rank would end."""

    def __init__(self) -> None:
        self.reason, self.others = "", list[int]()
        self.event = threading.Event()

    def __call__(self, reason: str, others: Iterable[int]) -> None:
        self.reason, self.others = reason, list(others)
        self.event.set()


Both = tuple[Pulse, Ended, Pulse, Ended]


@pytest.fixture
def ranks() -> tuple[Ranks, Ranks]:
    return LEADER, FOLLOWER


@pytest.fixture
def both(ranks: tuple[Ranks, Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(pulse, "SIGN_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(pulse, "STEP_SECONDS", 0.8)
    context, endpoint = zmq.Context[zmq.Socket[bytes]](), f"ipc://{tmp_path}/signs"
    bound, connected = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    bound.bind(endpoint)
    connected.setsockopt(zmq.ROUTING_ID, name_of(1))
    connected.connect(endpoint)
    ends = Ended(), Ended()
    leader, follower = Pulse(ranks[0], bound, ends[0]), Pulse(ranks[1], connected, ends[1])
    leader.start()
    follower.start()
    yield leader, ends[0], follower, ends[1]
    leader.stop()
    follower.stop()
    context.term()


def turn_for(seconds: float, *pulses: Pulse) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for each in pulses:
            each.turn()
        time.sleep(0.01)


def test_turning_loops_keep_a_group_alive(both: Both) -> None:
    leader, of_leader, follower, of_follower = both
    turn_for(0.6, leader, follower)
    assert not of_leader.event.is_set() and not of_follower.event.is_set()


def test_a_loop_that_does_not_turn_ends_the_group(both: Both) -> None:
    leader, of_leader, _, _ = both
    while not of_leader.event.is_set():
        turn_for(0.05, leader)
    assert "rank 1 of 2 hangs: its loop has not turned for 0." in of_leader.reason
    assert of_leader.others == [os.getpid()]


@pytest.mark.parametrize("ranks", [(REMOTE_LEADER, REMOTE_FOLLOWER)])
def test_no_process_of_another_host_is_killed(both: Both) -> None:
    """Its number may be that of any process here."""
    leader, of_leader, _, _ = both
    while not of_leader.event.is_set():
        turn_for(0.05, leader)
    assert "rank 1 of 2 hangs" in of_leader.reason and of_leader.others == []


def test_a_step_may_take_longer_but_not_for_ever(both: Both) -> None:
    leader, _, follower, of_follower = both
    with leader.step():
        turn_for(0.6, follower)
        assert not of_follower.event.is_set()
        while not of_follower.event.is_set():
            turn_for(0.05, follower)
    assert "rank 0 of 2 hangs: its step takes" in of_follower.reason


def test_a_rank_without_signs_is_lost(both: Both) -> None:
    leader, of_leader, follower, _ = both
    turn_for(0.2, leader, follower)
    follower.stop()
    while not of_leader.event.is_set():
        turn_for(0.05, leader)
    assert "rank 1 of 2 was silent for 0." in of_leader.reason
