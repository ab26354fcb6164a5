"""Machines that keep processes, each in a small user of its own, for the table of `test_processes.py`.

Each machine of the product passes it: to add one, add a class to MACHINES. `python -m tests.contract.machines NAME MODE
[subreaper]` works once for each line of its input, and prints the outcome as a line of JSON.
"""

import asyncio
import ctypes
import json
import sys
from abc import ABC, abstractmethod
from typing import ClassVar

from gpu_worker.constraints.constraints import Constraints
from scheduler_svc.frontend.constraints.trials import TrialProcess, TrialUnusable
from tests.gpu_worker.constraints import rig
from tests.rigs import byte_tokenizer

# What is wrong with the processes: nothing; they cannot do their work and say why; each ends without a word.
SOUND, REFUSES, DIES = MODES = ("sound", "refuses", "dies")
_PR_SET_CHILD_SUBREAPER = 36


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
        """As `Machine`."""
        self._constraints.prepare(b"begin", self._grammar().encode())

    def serve(self) -> str:
        """As `Machine`."""
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
        """As `Machine`."""
        self._task = self._loop.create_task(self._trial.judge(self._grammar()))
        self._loop.run_until_complete(asyncio.sleep(0))

    def serve(self) -> str:
        """As `Machine`."""
        try:
            return self._loop.run_until_complete(self._trial.judge(self._grammar())).refusal
        except TrialUnusable as reason:
            return str(reason)


MACHINES: dict[str, type[Machine]] = {"mask server": Masks, "grammar trials": Trials}


def main(name: str, mode: str, *rest: str) -> None:
    """Serves at once, and again for each line of the input; begins alone for the line `begin`."""
    if rest:
        assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    machine = MACHINES[name](mode)
    for line in sys.stdin:
        outcome = machine.begin() if line == "begin\n" else machine.serve()
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
