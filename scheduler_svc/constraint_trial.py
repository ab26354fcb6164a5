"""`python -m scheduler_svc.constraint_trial`: the process that tries grammars, which a front end starts.

llguidance may need minutes for a small grammar and cannot be interrupted, so it runs where it can be killed. The
process reads the tokenizer once (`tandem_contract/fork_server.py`). Its child takes one packet and sends one back,
until the front end closes the socket, or kills it (`frontend/constraints/trials.py`).

A request is a grammar, and whether its trial waits for CPU time that nothing else wants. Its answer is why the grammar
is refused, empty if it is not. The child's first packet has its process id, and how slow its machine is. A trial
compiles the grammar, computes the first mask, and walks through 64 masks at random; the walk of one grammar is always
the same.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem_contract.fork_server import serve_forks
from tandem_contract.grammars import MASK_SECONDS, limit_words, may_end
from tandem_contract.needed import ends_with_needed

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_ERROR_CHARS = 1_000
# A grammar has at most 64 KiB.
MAX_PACKET = 1 << 17
NUM_MASKS = 64
# 0.3 GiB of it are used with a tokenizer of 152,000 tokens.
MAX_ADDRESS_SPACE = 1 << 30
_NICE = 10
# The first bytes of packets: of a trial with a share of the CPU, which is small because of _NICE, and of all others.
SHARE, ANY = b"!", b" "


def packed(text: str, mark: bytes = ANY) -> bytes:
    """A packet. It begins with a byte of its own, because an empty one would read like the end."""
    return mark + text.encode()


def unpacked(packet: bytes) -> str:
    return packet[1:].decode()


class Trial:
    def __init__(self, tokenizer: "LLTokenizer", eos_token_ids: Sequence[int], slowness: float = 1.0) -> None:
        """`eos_token_ids` are the model's. `slowness` multiplies limits."""
        self._tokenizer, self.slowness = tokenizer, slowness
        self._eos = frozenset(eos_token_ids)
        # What llguidance takes for the end although it is not the model's.
        self._hidden = [token for token in tokenizer.eos_tokens if token not in self._eos]

    def refusal(self, grammar: str) -> str:
        """Returns why the grammar is refused, in one sentence; empty if it is not."""
        try:
            return self._walk(grammar)
        # llguidance's panics are not Exceptions.
        except BaseException as error:
            return f"llguidance: {type(error).__name__}: {_reason(str(error))}"

    def _walk(self, grammar: str) -> str:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        rng = random.Random(sha256(grammar.encode()).digest())
        for step in range(NUM_MASKS + 1):
            if matcher.is_error():
                return f"llguidance: {_reason(matcher.get_error())}"
            if matcher.is_stopped():
                return "" if matcher.is_accepting() else f"llguidance stopped: {matcher.stop_reason()}"
            begun = time.thread_time()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            seconds = time.thread_time() - begun
            if matcher.is_error():
                continue
            if seconds > MASK_SECONDS * self.slowness:
                took = f"the mask of output token {step + 1} took {seconds * 1e3:.0f} ms of CPU time"
                return f"{took}; {limit_words(MASK_SECONDS, self.slowness)}"
            too_early = [token for token in self._eos if bits[token] and not may_end(matcher, token)]
            allowed = bits.nonzero()[0]
            allowed = allowed[~np.isin(allowed, [*self._hidden, *too_early])]
            if not len(allowed):
                return f"no token of the model may come as output token {step + 1}"
            token = int(allowed[rng.randrange(len(allowed))])
            if token in self._eos:
                return ""
            matcher.consume_token(token)
        return ""


def _reason(text: str) -> str:
    """The first line of llguidance's message, and the cause of a refused pattern; other lines show what was parsed."""
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Write anyOf")
    first, *others = text.strip().splitlines() or [""]
    cause = next((line.removeprefix("error:") for line in others if line.startswith("error:")), "")
    return first.removesuffix(" regex parse error:") + cause


def load(given: dict[str, Any]) -> Callable[[socket.socket], None]:
    """Returns what serves one front end. Raises what llguidance raises."""
    _give_way()
    from tandem_contract.grammars import constraint_tokenizer, slowness

    eos = given["eos"]
    tokenizer = constraint_tokenizer(given["tokenizer"].decode(), given["vocab_size"], eos)
    return partial(_serve, Trial(tokenizer, eos, slowness()))


def _give_way() -> None:
    """Lets others go first."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # On a busy machine a process under SCHED_IDLE would read the tokenizer for minutes.
    os.nice(_NICE)


def _serve(trial: Trial, connection: socket.socket) -> None:
    connection.send(packed(f"{os.getpid()} {trial.slowness}"))
    while packet := connection.recv(MAX_PACKET):
        if not packet.startswith(SHARE):
            # For good: a process without privileges could not leave it again.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        connection.send(packed(trial.refusal(unpacked(packet))[:MAX_ERROR_CHARS]))


if __name__ == "__main__":
    with ends_with_needed("scheduler_svc.constraint_trial"):
        sys.exit(serve_forks(load))
