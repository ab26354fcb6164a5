"""A place at a meeting whose store falls silent, as behind a pulled cable: no call waits for it."""

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousInfo, RendezvousStoreInfo

from gpu_worker.group import meeting
from gpu_worker.group.launch import Meeting
from gpu_worker.group.meeting import Place
from tests.rigs.waiting import TIMEOUT_SECONDS, until

HOSTS = Meeting(num_hosts=2, host="127.0.0.1", port=1, run_id="hosts-x", address="127.0.0.1")


class Handler(RendezvousHandler):
    """Host 1 of two with two ranks each. Answers while `answers` is set."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = self.num_waiting = 0
        self._is_closed = is_closed

    def num_nodes_waiting(self) -> int:
        self.num_asked += 1
        self.answers.wait()
        return self.num_waiting

    def next_rendezvous(self) -> RendezvousInfo:
        self.answers.wait()
        if self._is_closed:
            raise RendezvousClosedError("this one is closed")
        store = dist.HashStore()
        store.set("ranks/0", "2")
        return RendezvousInfo(store, 1, 2, RendezvousStoreInfo("leader", 7))

    def get_backend(self) -> str:
        return "test"

    def get_run_id(self) -> str:
        return "test"

    def is_closed(self) -> bool:
        return True

    def set_closed(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> bool:
        raise NotImplementedError


class Bench:
    """A place that gets one handler after another."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.num_used = 0
        self.met = threading.Event()
        self.place = Place(HOSTS, 2, self.met.set)

    def at_meeting(self) -> Handler:
        self.num_used += 1
        return self.handlers[self.num_used - 1]

    def join(self) -> dict[str, str]:
        self.met.clear()
        while (found := self.place.variables()) is None:
            assert self.met.wait(TIMEOUT_SECONDS)
        return found


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name, seconds in {"ANSWER": 0.5, "_JOIN": 0.1, "_ASK": 0.0, "_PAUSE": 0.0}.items():
        monkeypatch.setattr(meeting, f"{name}_SECONDS", seconds)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    found = Bench()
    monkeypatch.setattr(found.place, "_at_meeting", found.at_meeting)
    yield found
    # Ends the threads that were left behind.
    for handler in found.handlers:
        handler.num_waiting = 1
        handler.answers.set()


def test_the_ranks_of_all_hosts_are_numbered_and_a_place_is_kept(bench: Bench) -> None:
    bench.handlers = [Handler()]
    for _ in range(2):
        assert bench.join() == {
            "RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "leader", "MASTER_PORT": "7",
        }  # fmt: skip
    assert bench.num_used == 1


@pytest.mark.parametrize("problem", [r"no answer in 0\.5 s", "this one is closed"])
def test_a_silent_or_closed_meeting_is_left_for_a_new_place(
    bench: Bench, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.handlers = [Handler(is_closed="closed" in problem), Handler()]
    if "answer" in problem:
        bench.handlers[0].answers.clear()
    assert bench.join()["RANK"] == "2"
    assert bench.num_used == 2
    assert "waiting for the other hosts of the group at 127.0.0.1:1; the meeting's host does not answer:" in caplog.text


def test_an_error_that_nobody_expects_is_raised_where_the_answer_is_read(bench: Bench) -> None:
    with pytest.raises(IndexError):
        bench.join()


def test_ranks_end_for_a_host_that_waits_and_not_for_a_silent_store(bench: Bench) -> None:
    [handler] = bench.handlers = [Handler()]
    bench.join()
    waits, late = threading.Event(), threading.Event()
    bench.place.watch(late.set)
    handler.answers.clear()
    num_asked = handler.num_asked
    until(lambda: handler.num_asked <= num_asked + 1, "a question that waits")
    assert not late.is_set()
    handler.answers.set()
    bench.join()
    bench.place.watch(waits.set)
    handler.num_waiting = 1
    assert waits.wait(TIMEOUT_SECONDS)
    # That start was over.
    assert not late.is_set()
