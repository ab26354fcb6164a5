"""Torch's elastic agent, which torchrun is a command line of: starts this host's ranks at each meeting of the hosts.

Owns the agent and what outlives one start: this host's place in the rendezvous (c10d). The agent notices within 0.1 s
that a rank of this host has ended, and then ends the others of this host. Ranks of other hosts end by themselves
(`pulse.py`), and then their agents come to the rendezvous again. While this host's ranks run, an agent of another host
that waits there makes this one start them again.
"""

import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from gpu_worker.failures import first_line
from gpu_worker.group.hosts import Meeting, interface_of
from gpu_worker.group.meeting_state import handler_of
from gpu_worker.group.place import Place
from gpu_worker.group.words import GROUP_LOST, REFUSED_CODES, STORE_VARIABLE
from tandem_contract.child import PARENT
from tandem_contract.logs import is_worth_a_line

log = logging.getLogger(__name__)

_MONITOR_SECONDS = 0.1
# How long an agent waits at the meeting before it says so again, and for an answer of the meeting's host.
_JOIN_SECONDS, _READ_SECONDS, _CONNECT_SECONDS = 60, 10, 2.0
# A host that is silent for five seconds is no longer at the meeting. It has left before: its ranks were noticed.
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_TRIES = 1, 5
# Between looks for the meeting's host.
_PAUSE_SECONDS = 1.0
# For ranks that are told to end.
_STOP_SECONDS = 5
# Of agents for each other, after all ranks have ended in order.
_EXIT_SECONDS = 2.0
# The ranks have a store of their own for each start: this one still has what earlier starts left in it.
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class _LocalAgent(LocalElasticAgent):
    """Torch's, but for its patience: it gives ranks 30 s to end, which one that is stopped needs."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _STOP_SECONDS) -> None:
        super()._shutdown(death_sig, min(timeout, _STOP_SECONDS))


class Agent:
    """Starts this host's ranks as often as it is asked to."""

    def __init__(self, num_ranks: int, command: Sequence[str], meeting: Meeting) -> None:
        """num_ranks: those of this host, as `python -m COMMAND`."""
        self._num_ranks, self._command, self._meeting = num_ranks, tuple(command), meeting
        self._place: Place | None = None
        self._logs = DefaultLogsSpecs()
        os.environ.update(_OWN_STORE)
        os.environ[PARENT] = str(os.getpid())
        if meeting.num_hosts == 1:
            # Ranks of one host need no port that others reach.
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, "lo")
        elif interface := interface_of(meeting.address):
            # Otherwise gloo takes the address that the host's own name means, often a loopback address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def start_once(self) -> int:
        """Waits until all hosts have met, starts the ranks and waits for their end.

        Returns the exit code of the rank that ended the group, 0 if all ended in order. Raises SignalException.
        """
        num_waits, meeting = 0, self._meeting
        if meeting.num_hosts > 1:
            log.info(
                "this host is %s; its ranks start when %d hosts have met at %s",
                meeting.address, meeting.num_hosts, meeting.endpoint,
            )  # fmt: skip
        while True:
            try:
                if meeting.num_hosts == 1:
                    return self._start_here()
                self._place = self._place or self._at_meeting()
                self._place.check()
                return self._run(self._place)
            except RendezvousTimeoutError:
                reason = "not all hosts are there"
            except RendezvousError as error:
                self._place, reason = (
                    None,
                    f"the meeting's host does not answer: {first_line(error.__cause__ or error)}",
                )
            # The thread of a lost place, which says each second that this host is there, ends with its objects.
            gc.collect()
            num_waits += 1
            if is_worth_a_line(num_waits):
                log.warning("waiting for the other hosts of the group at %s; %s", meeting.endpoint, reason)
            time.sleep(_PAUSE_SECONDS)

    def _start_here(self) -> int:
        """Starts the ranks of a group on this host alone. What they say to find each other is in files of this user.

        Torch's stores would listen on all interfaces.
        """
        with tempfile.TemporaryDirectory(prefix="tandem-group-") as folder:
            os.environ[STORE_VARIABLE] = f"{folder}/ranks"
            parameters = RendezvousParameters(
                backend="c10d",
                endpoint=f"{folder}/meeting",
                run_id=self._meeting.run_id,
                min_nodes=1,
                max_nodes=1,
                local_addr=self._meeting.address,
                store_type="file",
            )
            return self._run(Place(handler_of(parameters), join_seconds=_JOIN_SECONDS))

    def _at_meeting(self) -> Place:
        """A place at the meeting. Raises RendezvousError."""
        meeting = self._meeting
        is_held_here = meeting.is_held_here()
        if not is_held_here:
            # Torch's own attempt holds up signals.
            try:
                socket.create_connection((meeting.host, meeting.port), _CONNECT_SECONDS).close()
            except OSError as error:
                raise RendezvousConnectionError(str(error)) from error
        handler = handler_of(
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
        return Place(handler, join_seconds=_JOIN_SECONDS)

    def _run(self, place: Place) -> int:
        # The place is never shut down, because that ends the meeting for the other hosts too.
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._num_ranks,
            entrypoint=sys.executable,
            args=("-P", "-m", *self._command),
            rdzv_handler=place,
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
            local_addr=self._meeting.address,
        )
        result = cast("RunResult", _LocalAgent(spec, self._logs, exit_barrier_timeout=_EXIT_SECONDS).run())
        if not result.is_failed():
            return 0
        codes = [failure.exitcode for failure in result.failures.values()]
        log.debug("exit codes of the failed ranks: %s", codes)
        for rank, failure in result.failures.items():
            # A rank that the kernel kills because memory ran out says nothing. The agent sends SIGTERM to the rest.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                log.warning("rank %d was ended by %s", rank, failure.signal_name())
        refused = [code for code in codes if code in REFUSED_CODES]
        return refused[0] if refused else GROUP_LOST
