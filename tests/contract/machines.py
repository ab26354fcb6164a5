"""Machines that keep processes, each in a small user of its own, for the table of `test_processes.py`.

Each machine of the product passes it: to add one, add a class to MACHINES. `python -m tests.contract.machines NAME MODE
ADOPTS` works once for each line of its input, and prints the outcome as a line of JSON. Pauses before a process is
started again are short here: `test_restart.py` has their lengths.
"""

import asyncio
import ctypes
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import psutil

from gpu_worker.constraints.constraints import Constraints
from scheduler_svc.frontend.constraints.trials import TrialProcess, TrialUnusable
from tandem_contract import child, processes
from tandem_contract.processes import ServiceEnded, Supervisor, run_async
from tests.gpu_worker.constraints import rig
from tests.rigs import byte_tokenizer

# What is wrong with the processes: nothing; they cannot do their work and say why; each ends without a word.
SOUND, REFUSES, DIES = MODES = ("sound", "refuses", "dies")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWPID, _MS_REC, _MS_PRIVATE = 0x20000, 0x20000000, 1 << 14, 1 << 18
_PAUSE_SECONDS = 0.02


class Machine(ABC):
    """The user's part of one machine."""

    # A program that ends at once, for DIES.
    false = "/bin/false"
    # Patterns of the outcomes that its people see in REFUSES and in DIES.
    cause: ClassVar[str]
    give_up: ClassVar[str]

    def __init__(self, mode: str) -> None:
        self._mode, self._num = mode, 0
        if mode == DIES:
            sys.executable = self.false

    @abstractmethod
    def begin(self) -> None:
        """Starts the processes, and does not wait for them."""

    @abstractmethod
    def serve(self) -> str:
        """Has the processes do a new piece of work; returns "", or what is said to people of the failure."""

    def _grammar(self) -> str:
        self._num += 1
        return f'start: "{self._num}"'


class Masks(Machine):
    """A worker and its mask server."""

    cause = r"^the model's tokenizer does not serve constraints: \w+: .*tokenizer"
    give_up = r"^the mask server ended 6 times in a row: the process that forks has ended$"

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        text = b"no tokenizer" if mode == REFUSES else rig.tokenizer_json()
        self._constraints = Constraints(text, rig.SIZES, [rig.EOS])

    def begin(self) -> None:
        self._constraints.prepare(b"begin", self._grammar().encode())

    def serve(self) -> str:
        [outcome] = rig.prepare(self._constraints, self._grammar()).values()
        return outcome


class Trials(Machine):
    """A front end and the process in which it tries grammars."""

    cause = r"^\w+: .*tokenizer"
    give_up = r"^its process has ended$"

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self._loop = asyncio.new_event_loop()
        text = b"no tokenizer" if mode == REFUSES else byte_tokenizer.tokenizer_json()
        self._trial = TrialProcess(
            text, vocab_size=byte_tokenizer.VOCAB_SIZE, eos_token_ids=[byte_tokenizer.EOS_ID], patience_seconds=1e9
        )

    def begin(self) -> None:
        self._task = self._loop.create_task(self._trial.judge(self._grammar()))
        self._loop.run_until_complete(asyncio.sleep(0))

    def serve(self) -> str:
        try:
            return self._loop.run_until_complete(self._trial.judge(self._grammar())).refusal
        except TrialUnusable as reason:
            return str(reason)


class Supervised(Machine):
    """A machine that keeps programs by supervisors; `kept.py` stands for each of them."""

    cause = r"ended with (exit )?code 2\b.*: no tokenizer$"
    num_processes = 1

    def __init__(self, mode: str) -> None:
        os.environ.update(KEPT_MODE=mode, KEPT_PYTHON=sys.executable)
        sys.executable = str(Path(__file__).with_name("kept.sh"))
        super().__init__(mode)
        self._failure = ""
        # What people see.
        self._shown = sys.stdout = sys.stderr = io.StringIO()
        logging.basicConfig(level=logging.INFO, stream=self._shown)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep_until_it_fails()), daemon=True)

    @abstractmethod
    async def keep(self) -> None:
        """Keeps the programs running. Raises when one is given up."""

    def begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def serve(self) -> str:
        self.begin()
        while not self._failure and self._num_serving() < self.num_processes:
            time.sleep(0.01)
        return self._failure

    async def _keep_until_it_fails(self) -> None:
        try:
            await self.keep()
        except Exception as error:
            self._failure = str(error)

    def _num_serving(self) -> int:
        pids = set(re.findall(r"\bserves (\d+)$", self._shown.getvalue(), re.MULTILINE))
        return sum(psutil.pid_exists(int(pid)) for pid in pids)

    async def _keep_all(self, *supervisors: Supervisor) -> None:
        try:
            await asyncio.gather(*map(run_async, supervisors))
        finally:
            for each in supervisors:
                each.stop(5.0)
            await asyncio.gather(*map(run_async, supervisors), return_exceptions=True)


class Serve(Supervised):
    """`tandem serve` with its scheduler and a worker."""

    give_up = r"^the (scheduler|worker) ended with exit code 1 before it served: it printed nothing$"
    num_processes = 2

    async def keep(self) -> None:
        from tandem_client.services.pair import ServicePair

        def on_line(name: str, line: str) -> None:
            print(line)
            if name == "worker":
                # Otherwise the scheduler's load says so.
                pair.worker.mark_serving()

        settings = {"tokens": None, "tls_cert": None, "tls_key": None, "health_listen": None}
        pair = ServicePair(
            scheduler_flags=[], worker_flags=[], settings=settings, on_line=on_line, on_end=lambda _: None, say=print
        )
        pair.start()
        try:
            await pair.guard(asyncio.sleep(1e6))
        finally:
            await pair.stop(5.0)


class Gateways(Supervised):
    """A gateway of several processes."""

    give_up = r"^the gateway \d ended with exit code 1 before it served: it printed nothing$"
    num_processes = 2

    async def keep(self) -> None:
        from tandem_client.gateway.server import supervisors_of
        from tandem_client.gateway.settings import Settings

        await self._keep_all(*supervisors_of(Settings(processes=self.num_processes), [], "http://127.0.0.1:1"))


class FrontEnd(Supervised):
    """The scheduler service and a front end."""

    give_up = r"^the front end ended with code 1 before it listened$"

    async def keep(self) -> None:
        from scheduler_svc.processes.frontends import FrontendProcesses, FrontEndSettings

        settings = FrontEndSettings(endpoint="", listen="127.0.0.1:0", max_message_bytes=1, grace_seconds=1.0)
        front_ends = FrontendProcesses(1, settings, silence_seconds=1e6)
        while True:
            front_ends.watch(restart=True)
            await asyncio.sleep(0.02)


class OnNode(Supervised):
    """Ray's actor and its worker."""

    give_up = r"^ended with exit code 1, 3 times in a row; it is not started again: it printed nothing$"

    async def keep(self) -> None:
        from gpu_worker.cluster.fleet import Fleet, Worker

        worker = Worker(Fleet(name="it", max_failures=3), 0)
        while (report := worker.report()).state != "given up":
            await asyncio.sleep(0.02)
        raise ServiceEnded(report.cause)


class Ranks(Supervised):
    """The launcher of a group of ranks on one host."""

    give_up = r"^the group of 2 ranks ended with exit code 1: it printed nothing$"
    num_processes = 2

    async def keep(self) -> None:
        from gpu_worker.group.launch import Meeting, ranks_of_host

        await self._keep_all(ranks_of_host(self.num_processes, child.python("rank"), Meeting()))


MACHINES: dict[str, type[Machine]] = {
    "mask server": Masks,
    "grammar trials": Trials,
    "serve": Serve,
    "gateway processes": Gateways,
    "front end": FrontEnd,
    "worker on a node": OnNode,
    "group of ranks": Ranks,
}


def _become_process_1() -> None:
    """Goes on in a child that is process 1 of its own, with its own /proc. This process waits for the child's end."""
    library = ctypes.CDLL(None, use_errno=True)
    assert library.unshare(_CLONE_NEWNS | _CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
    if inner := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
    assert library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    assert library.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
    assert library.mount(b"proc", b"/proc", b"proc", 0, None) == 0, os.strerror(ctypes.get_errno())


def main(name: str, mode: str, adopts: str) -> None:
    """Serves at once, and again for each line of the input; begins alone for the line `begin`.

    `adopts`: how it gets the orphans of its processes, as `subreaper` or as `process 1`; empty: it gets none.
    """
    if adopts == "subreaper":
        assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    elif adopts:
        _become_process_1()
    processes.Restart._next_pause = lambda _: _PAUSE_SECONDS
    child._ORPHANS_SECONDS = _PAUSE_SECONDS
    answers = sys.stdout
    machine = MACHINES[name](mode)
    for line in sys.stdin:
        outcome = machine.begin() if line == "begin\n" else machine.serve()
        print(json.dumps(outcome), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
