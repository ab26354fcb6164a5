"""`python -m scheduler_svc.constraint_trial`: reads the tokenizer once, then forks a child for each packet.

A packet brings the end of another socket. The last child is killed, and the next one serves there, so that a child that
takes too long has a successor at once. If the tokenizer cannot be read, the reason is sent and the process ends.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_svc.constraint_trial.frames import MAX_ERROR_CHARS
from tandem_contract.parent import die_with_parent

if TYPE_CHECKING:
    from scheduler_svc.constraint_trial.trial import Trial

MAX_ADDRESS_SPACE = 1 << 30
_NICE = 10


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    given = _parse(arguments)
    die_with_parent()
    # At a terminal the front end ends in order, and this process after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _give_way()
    control = socket.socket(fileno=given.control)
    try:
        from scheduler_svc.constraint_trial.trial import Trial
        from tandem_contract.grammar_process import constraint_tokenizer, slowness

        text = Path(f"/proc/self/fd/{given.tokenizer}").read_bytes().decode()
        trial = Trial(constraint_tokenizer(text, given.vocab_size, given.eos), given.eos, slowness())
    except BaseException as error:  # llguidance's panics are no Exceptions
        control.send(f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS].encode())
        return 1
    # The children share what is here.
    gc.freeze()
    return _fork_children(control, trial)


def _give_way() -> None:
    """Lets others go first, and ends first if memory is short. Trials use only CPU time that nothing else wants."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # On a busy machine a process under SCHED_IDLE would read the tokenizer for minutes.
    os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _fork_children(control: socket.socket, trial: "Trial") -> int:
    """Until the front end closes its end of the socket."""
    from scheduler_svc.constraint_trial.child import serve

    child = 0
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not packet:
            return 0
        connection = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if not child:
            code = 1
            try:
                die_with_parent()
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                control.close()
                serve(connection, trial)
                code = 0
            finally:
                os._exit(code)
        connection.close()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scheduler_svc.constraint_trial", description="Tries grammars.")
    for name in ("control", "tokenizer", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--eos", type=int, nargs="*", default=[])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
