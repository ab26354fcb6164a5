"""`python -m scheduler_svc.constraint_trial`: the process that tries grammars, which a front end starts.

It reads the tokenizer once (`tandem_contract/fork_server.py`). Its child takes one packet and sends one back, until the
front end closes the socket, or kills it.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from scheduler_svc.constraint_trial.frames import HELLO, MAX_ERROR_CHARS, MAX_PACKET, packed, unpacked
from tandem_contract.fork_server import serve_forks

if TYPE_CHECKING:
    from scheduler_svc.constraint_trial.trial import Trial

MAX_ADDRESS_SPACE = 1 << 30
_NICE = 10


def load(given: dict[str, Any]) -> Callable[[socket.socket], None]:
    """Returns what serves one front end. Raises what llguidance raises."""
    _give_way()
    from scheduler_svc.constraint_trial.trial import Trial
    from tandem_contract.grammar_process import constraint_tokenizer, slowness

    eos = given["eos"]
    tokenizer = constraint_tokenizer(given["tokenizer"].decode(), given["vocab_size"], eos)
    return partial(_serve, Trial(tokenizer, eos, slowness()))


def _give_way() -> None:
    """Lets others go first. Trials use only CPU time that nothing else wants."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # On a busy machine a process under SCHED_IDLE would read the tokenizer for minutes.
    os.nice(_NICE)


def _serve(trial: "Trial", connection: socket.socket) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    connection.send(packed(HELLO, f"{os.getpid()} {trial.slowness}"))
    while packet := connection.recv(MAX_PACKET):
        number, grammar = unpacked(packet)
        connection.send(packed(number, trial.refusal(grammar)[:MAX_ERROR_CHARS]))


if __name__ == "__main__":
    sys.exit(serve_forks(load))
