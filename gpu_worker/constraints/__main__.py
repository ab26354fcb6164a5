"""`python -m gpu_worker.constraints`: the mask server's process, which a worker starts.

It loads the tokenizer once. Each packet on its socket brings the end of another socket: it kills its child, if there
is one, and forks the next, which serves the worker there (`server.py`). So a matcher that takes too long is killed,
and its successor has the tokenizer at once. Imports no torch.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import argparse
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.constraints.area import SharedArea, Sizes
from gpu_worker.constraints.words import MAX_PACKET
from tandem_contract.parent import die_with_parent

if TYPE_CHECKING:
    from gpu_worker.constraints.matchers import Matchers


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    given = _parse(arguments)
    # At a terminal the worker ends in order, and this process after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If memory is short, this process goes before the worker; it is started again.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    control = socket.socket(fileno=given.control)
    area = SharedArea(
        given.memory, Sizes(max_rows=given.max_rows, vocab_size=given.vocab_size, max_length=given.max_length)
    )
    try:
        from gpu_worker.constraints.matchers import Matchers
        from tandem_contract.grammar_process import constraint_tokenizer, slowness

        with open(given.tokenizer, "rb") as file:
            text = file.read().decode()
        tokenizer = constraint_tokenizer(text, given.vocab_size, given.eos)
        matchers, slow = Matchers(tokenizer, eos_token_ids=given.eos), slowness()
    except BaseException as error:  # llguidance's panics are no Exceptions
        control.send(f"{type(error).__name__}: {error}".encode()[:MAX_PACKET])
        return 1
    # The children share what is here.
    gc.freeze()
    return _fork_children(control, area, matchers, slow)


def _fork_children(control: socket.socket, area: SharedArea, matchers: "Matchers", slow: float) -> int:
    """Until the worker closes its end of the socket."""
    from gpu_worker.constraints.server import MaskServer

    child = 0
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not packet:
            return 0
        connection = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if not child:
            die_with_parent()
            control.close()
            code = 1
            try:
                MaskServer(connection, area, matchers, slow).serve()
                code = 0
            finally:
                os._exit(code)
        connection.close()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_worker.constraints", description="Computes the masks of a worker.")
    for name in ("control", "memory", "vocab-size", "max-rows", "max-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--eos", type=int, nargs="*", default=[])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
