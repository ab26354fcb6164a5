"""Signs of life between two threads that stand for two ranks, on a clock that waits until both heard of each other."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpu_worker.group import pulse
from gpu_worker.group.pulse import Pulse
from gpu_worker.group.wires import name_of
from gpu_worker.process.ranks import Ranks
from tests.rigs.waiting import TIMEOUT_SECONDS, until

LEADER, FOLLOWER = (Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in (0, 1))


class Ended:
    """Notes why a rank would end."""

    def __init__(self) -> None:
        self.reason = ""
        self.event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.event.set()


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Socket:
    """Counts the signs that have come, and notes when its rank began to wait for the next one."""

    def __init__(self, socket: zmq.Socket[bytes], clock: Clock) -> None:
        self._socket, self._clock = socket, clock
        self.num_signs, self.waits_since = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def poll(self, milliseconds: float) -> int:
        self.waits_since = self._clock.now
        return self._socket.poll(milliseconds)

    def recv_multipart(self) -> list[bytes]:
        parts = self._socket.recv_multipart()
        self.num_signs += 1
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """Two ranks that run."""

    clock: Clock
    pulses: tuple[Pulse, Pulse]
    sockets: tuple[Socket, Socket]
    ends: tuple[Ended, Ended]

    def go_on(self, count: int, *turning: Pulse) -> None:
        """Lets `count` signs pass both ways, while these loops turn."""
        for _ in range(count):
            # A rank that begins to wait after the next sign is due would send one too few.
            until(lambda: self._has_ended() or all(each.waits_since == self.clock.now for each in self.sockets))
            self.clock.now += pulse.SIGN_SECONDS
            for each in turning:
                each.turn()
            heard = [socket.num_signs for socket in self.sockets]
            until(lambda heard=heard: self._has_ended() or all(map(gt, self._heard(), heard)))

    def end_of(self, rank: int, *turning: Pulse) -> Ended:
        """Goes on until this rank ends."""
        while not self.ends[rank].event.is_set():
            self.go_on(1, *turning)
        return self.ends[rank]

    def _heard(self) -> list[int]:
        return [socket.num_signs for socket in self.sockets]

    def _has_ended(self) -> bool:
        return any(end.event.is_set() for end in self.ends)


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    monkeypatch.setattr(pulse, "SIGN_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(pulse, "STEP_SECONDS", 0.8)
    context, endpoint = zmq.Context[zmq.Socket[bytes]](), f"ipc://{tmp_path}/signs"
    bound, connected = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    bound.bind(endpoint)
    connected.setsockopt(zmq.ROUTING_ID, name_of(1))
    connected.connect(endpoint)
    # A router drops what it sends to one that is still to connect.
    connected.send(b"here")
    assert bound.poll(1000 * TIMEOUT_SECONDS) and bound.recv_multipart()
    sockets, ends = (Socket(bound, clock), Socket(connected, clock)), (Ended(), Ended())
    leader, follower = (
        Pulse(each, socket, end) for each, socket, end in zip((LEADER, FOLLOWER), sockets, ends, strict=True)
    )
    leader.start()
    follower.start()
    yield Both(clock=clock, pulses=(leader, follower), sockets=sockets, ends=ends)
    leader.stop()
    follower.stop()
    context.term()


def test_turning_loops_keep_a_group_alive(both: Both) -> None:
    both.go_on(30, *both.pulses)
    assert not any(end.event.is_set() for end in both.ends)


def test_a_loop_that_does_not_turn_ends_the_group(both: Both) -> None:
    end = both.end_of(0, both.pulses[0])
    assert "rank 1 of 2 hangs: its loop has not turned for 0." in end.reason


def test_a_step_may_take_longer_but_not_for_ever(both: Both) -> None:
    leader, follower = both.pulses
    with leader.step():
        both.go_on(30, follower)
        assert not both.ends[1].event.is_set()
        end = both.end_of(1, follower)
    assert "rank 0 of 2 hangs: its step takes" in end.reason


def test_a_rank_without_signs_is_lost(both: Both) -> None:
    leader, follower = both.pulses
    both.go_on(10, leader, follower)
    follower.stop()
    while not both.ends[0].event.wait(pulse.SIGN_SECONDS):
        leader.turn()
        both.clock.now += pulse.SIGN_SECONDS
    assert "rank 1 of 2 was silent for 0." in both.ends[0].reason
