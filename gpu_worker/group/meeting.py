"""Where the launchers of a group on several hosts meet: torch's rendezvous (c10d), which torchrun uses too.

Owns this host's place there over all starts of its ranks, and the threads that ask for it. A call to the store of the
meeting ends when the kernel gives up the connection, after minutes, if a cable is pulled; so each call has a thread of
its own, which is left behind if there is no answer. Ranks of other hosts that end are noticed by those of this one
(`pulse.py`), and then all launchers come here again.
"""

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from gpu_worker.failures import first_line
from gpu_worker.group.launch import Meeting
from tandem_contract.logs import is_worth_a_line
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
ANSWER_SECONDS = 3.0
# How long a launcher waits at the meeting before it says so again, and for an answer of the meeting's host.
_JOIN_SECONDS, _READ_SECONDS, _CONNECT_SECONDS = 60, 10, 2.0
# A host that is silent for five seconds is no longer at the meeting. It has left before: its ranks were noticed.
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_TRIES = 1, 5
# Between looks for the meeting's host, and for hosts that wait there.
_PAUSE_SECONDS, _ASK_SECONDS = 1.0, 1.0
# The ranks have a store of their own for each start: this one still has what earlier starts left in it.
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Of a state in the store.
_MOST_BYTES = 1 << 20
_LOGS = "torch.distributed.elastic"


class Place:
    """This host's place at the meeting."""

    def __init__(self, meeting: Meeting, num_ranks: int, on_met: Callable[[], None]) -> None:
        """num_ranks: those of this host. on_met: called, in any thread, when `variables` has an answer."""
        self._meeting, self._num_ranks, self._on_met = meeting, num_ranks, on_met
        self._handler: RendezvousHandler | None = None
        self._joining: Future[dict[str, str]] | None = None
        self._num_starts = 0
        os.environ.update(_OWN_STORE)
        # The import has given each a level of its own.
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGS)]:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def variables(self) -> dict[str, str] | None:
        """Joins the meeting. Returns the variables of a start of the ranks once all hosts are there, None before.

        Raises OSError.
        """
        if self._joining is None:
            meeting = self._meeting
            log.info(
                "this host is %s; its ranks start when %s met at %s",
                meeting.address, numbered(meeting.num_hosts, "host", "have"), meeting.endpoint,
            )  # fmt: skip
            self._num_starts += 1
            self._joining = _in_thread(self._join)
            self._joining.add_done_callback(lambda _: self._on_met())
        if not self._joining.done():
            return None
        joined, self._joining = self._joining, None
        return joined.result()

    def watch(self, on_waiting: Callable[[], None]) -> None:
        """Calls `on_waiting`, in any thread, when another host waits for a start; until the next `variables`.

        A store that is silent or gone is no reason to end ranks.
        """
        handler, number = self._handler, self._num_starts
        assert handler is not None, "the hosts have met"

        def run() -> None:
            with suppress(RendezvousError):
                while self._num_starts == number and handler.num_nodes_waiting() == 0:
                    time.sleep(_ASK_SECONDS)
                if self._num_starts == number:
                    on_waiting()

        _in_thread(run)

    def _join(self) -> dict[str, str]:
        num_waits = 0
        while True:
            try:
                self._handler = self._handler or self._at_meeting()
                _within(ANSWER_SECONDS, self._handler.num_nodes_waiting)
                return _within(_JOIN_SECONDS + ANSWER_SECONDS, partial(_meet, self._handler, self._num_ranks))
            except RendezvousTimeoutError:
                reason = "not all hosts are there"
            # The store raises the last two if it goes away, or if no launcher has written what is in it.
            except (RendezvousError, RuntimeError, ValueError) as error:
                self._handler = None
                reason = f"the meeting's host does not answer: {first_line(error.__cause__ or error)}"
            # The thread of a lost place, which says each second that this host is there, ends with its objects.
            gc.collect()
            num_waits += 1
            if is_worth_a_line(num_waits):
                log.warning("waiting for the other hosts of the group at %s; %s", self._meeting.endpoint, reason)
            time.sleep(_PAUSE_SECONDS)

    def _at_meeting(self) -> RendezvousHandler:
        """A new place. Raises RendezvousError."""
        meeting = self._meeting
        is_held_here = meeting.is_held_here()
        if not is_held_here:
            # Torch's own attempt takes longer.
            try:
                socket.create_connection((meeting.host, meeting.port), _CONNECT_SECONDS).close()
            except OSError as error:
                raise RendezvousConnectionError(str(error)) from error
        return handler_of(
            RendezvousParameters(
                backend="c10d",
                endpoint=meeting.endpoint,
                run_id=meeting.run_id,
                min_nodes=meeting.num_hosts,
                max_nodes=meeting.num_hosts,
                local_addr=meeting.address,
                # Torch's own guess knows no second network interface.
                is_host=is_held_here,
                join_timeout=_JOIN_SECONDS,
                read_timeout=_READ_SECONDS,
                keep_alive_interval=_KEEP_ALIVE_SECONDS,
                keep_alive_max_attempt=_KEEP_ALIVE_TRIES,
            )
        )


def _meet(handler: RendezvousHandler, num_ranks: int) -> dict[str, str]:
    """Waits for the other hosts, and numbers the ranks over all of them. Raises RendezvousError."""
    met = handler.next_rendezvous()
    # A host with another number is found by the ranks.
    met.store.set(f"ranks/{met.rank}", str(num_ranks))
    counts = [int(met.store.get(f"ranks/{host}")) for host in range(met.world_size)]
    leader = met.bootstrap_store_info
    assert leader is not None, "c10d tells where rank 0 listens"
    return {
        "RANK": str(sum(counts[: met.rank])),
        "WORLD_SIZE": str(sum(counts)),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": leader.master_addr,
        "MASTER_PORT": str(leader.master_port),
    }


def _in_thread(call: Callable[[], Answer]) -> Future[Answer]:
    found: Future[Answer] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # Raised where the result is read.
            found.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    return found


def _within(seconds: float, call: Callable[[], Answer]) -> Answer:
    try:
        return _in_thread(call).result(seconds)
    except TimeoutError:
        raise RendezvousConnectionError(f"no answer in {seconds:g} s") from None


def _node(text: object) -> _NodeDesc:
    addr, pid, local_id = str(text).rsplit(" ", 2)
    return _NodeDesc(addr, int(pid), int(local_id))


# A launcher, as `ADDRESS PROCESS NUMBER`.
_Node = Annotated[
    _NodeDesc,
    PlainValidator(_node),
    PlainSerializer(lambda node: f"{node.addr} {node.pid} {node.local_id}", return_type=str),
]
# Sorted, so that equal states are the same bytes.
_Nodes = Annotated[set[_Node], PlainSerializer(sorted, return_type=list[_Node])]


class _State(BaseModel):
    """The state of a meeting, with the fields of torch's."""

    model_config = ConfigDict(extra="forbid")

    round: int
    complete: bool
    deadline: datetime | None
    closed: bool
    # Their numbers among the hosts.
    participants: dict[_Node, int]
    wait_list: _Nodes
    redundancy_list: _Nodes
    # When each has last given a sign.
    last_heartbeats: dict[_Node, datetime]


class Json:
    """The part of the module `pickle` that torch's rendezvous uses, with checked JSON.

    Torch unpickles what it reads, so whoever reaches the port of the store could run code in every launcher.
    """

    # `loads` raises the error that torch makes of this one.
    PickleError = ValueError

    @staticmethod
    def dumps(state: _RendezvousState) -> bytes:
        """The same bytes for equal states."""
        plain = _State.model_construct()
        for name, value in vars(state).items():
            setattr(plain, name, dict(sorted(value.items())) if isinstance(value, dict) else value)
        return plain.model_dump_json().encode()

    @staticmethod
    def loads(data: bytes) -> _RendezvousState:
        """Raises RendezvousStateError."""
        if len(data) > _MOST_BYTES:
            raise RendezvousStateError(f"the state of the meeting has {len(data)} bytes; the limit is {_MOST_BYTES}")
        try:
            plain = _State.model_validate_json(data)
        except ValidationError as error:
            raise RendezvousStateError("the state of the meeting is not one of a launcher of this version") from error
        state = _RendezvousState()
        vars(state).update(dict(plain))
        return state


def handler_of(parameters: RendezvousParameters) -> RendezvousHandler:
    """A place at the meeting. Raises RendezvousError."""
    dynamic_rendezvous.pickle = Json  # type: ignore[attr-defined]
    return get_rendezvous_handler(parameters)
