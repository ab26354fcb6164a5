"""This host's place at the meeting of a group's launchers (torch's rendezvous, c10d), with limits on its calls.

A call to the store of the meeting ends when the kernel gives up the connection, after minutes, if a cable is pulled.
Until then the process would notice neither the end of a rank nor a signal. So each call has a thread of its own, which
is left behind if there is no answer. Owns these threads.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousInfo

Answer = TypeVar("Answer")
ANSWER_SECONDS = 3.0
# Torch asks the store at most once in this time.
_ASK_SECONDS = 1.0


class Place(RendezvousHandler):
    """Stands for the handler that it gets. Of no more use after RendezvousConnectionError."""

    def __init__(self, handler: RendezvousHandler, *, join_seconds: float) -> None:
        """join_seconds: after which the handler gives up to wait for other hosts."""
        self._handler, self._join_seconds = handler, join_seconds
        self._num_waiting = 0
        self._asked: Future[int] | None = None
        self._ask_at = 0.0

    def check(self) -> None:
        """Raises RendezvousConnectionError if the store does not answer."""
        asked, self._asked = self._asked or _in_thread(self._handler.num_nodes_waiting), None
        _result(asked, ANSWER_SECONDS)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other hosts. Raises RendezvousError."""
        return _result(_in_thread(self._handler.next_rendezvous), self._join_seconds + ANSWER_SECONDS)

    def num_nodes_waiting(self) -> int:
        """The number of hosts that wait for a start, as last known: a silent store is no reason to end ranks."""
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._asked = _in_thread(self._handler.num_nodes_waiting)
        if self._asked is not None and self._asked.done():
            asked, self._asked, self._ask_at = self._asked, None, time.monotonic() + _ASK_SECONDS
            self._num_waiting = asked.result()
        return self._num_waiting

    @property
    def use_agent_store(self) -> bool:
        """As the handler's."""
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        """As the handler's."""
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        """As the handler's."""
        return self._handler.get_run_id()

    def is_closed(self) -> bool:
        """As the handler's."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """As the handler's."""
        self._handler.set_closed()

    def shutdown(self) -> bool:
        """As the handler's."""
        return self._handler.shutdown()


def _in_thread(call: Callable[[], Answer]) -> Future[Answer]:
    found: Future[Answer] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # Raised where the result is read.
            found.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    return found


def _result(asked: Future[Answer], seconds: float) -> Answer:
    try:
        return asked.result(seconds)
    except TimeoutError:
        raise RendezvousConnectionError(f"no answer in {seconds:g} s") from None
