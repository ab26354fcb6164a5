"""A place at a meeting whose store falls silent, as behind a pulled cable: no call waits for it."""

import threading
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError, RendezvousInfo

from gpu_worker.group import place
from gpu_worker.group.place import Place
from tests.rigs.waiting import TIMEOUT_SECONDS


class Handler(RendezvousHandler):
    """Answers while `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = 0

    def num_nodes_waiting(self) -> int:
        self.num_asked += 1
        self.answers.wait()
        return self.num_asked

    def next_rendezvous(self) -> RendezvousInfo:
        self.answers.wait()
        raise RendezvousClosedError("this one is closed")

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


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handler]:
    monkeypatch.setattr(place, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(place, "_ASK_SECONDS", 0.0)
    found = Handler()
    yield found
    # Ends the threads that were left behind.
    found.answers.set()


def test_a_silent_store_is_found_by_a_check_and_by_a_meeting(handler: Handler) -> None:
    here = Place(handler, join_seconds=0.1)
    here.check()
    handler.answers.clear()
    with pytest.raises(RendezvousConnectionError, match=r"no answer in 0\.5 s"):
        here.check()
    with pytest.raises(RendezvousConnectionError, match=r"no answer in 0\.6 s"):
        here.next_rendezvous()


def test_the_errors_of_a_meeting_are_passed_on(handler: Handler) -> None:
    with pytest.raises(RendezvousClosedError, match="this one is closed"):
        Place(handler, join_seconds=TIMEOUT_SECONDS).next_rendezvous()


def test_ranks_are_watched_while_the_store_is_silent(handler: Handler) -> None:
    """The agent asks between two looks at its ranks."""
    here = Place(handler, join_seconds=TIMEOUT_SECONDS)
    while here.num_nodes_waiting() < 2:
        pass
    handler.answers.clear()
    while handler.num_asked == (last := here.num_nodes_waiting()):
        pass
    assert [here.num_nodes_waiting() for _ in range(3)] == [last] * 3
    assert handler.num_asked == last + 1
    handler.answers.set()
    while here.num_nodes_waiting() == last:
        pass
