"""How slow this machine is for llguidance's work. Limits of CPU time are in seconds of the reference machine.

The unit is the CPU time of one piece of work of the same kind: `_GRAMMAR` is compiled with a tokenizer of single bytes,
and its first mask is computed. It is measured once, at the start of the process.
"""

import time

from llguidance import LLMatcher, LLTokenizer

_GRAMMAR = "start: /(x{100}){100}/"
# Of the reference machine: one core of an AMD EPYC, of which a virtual machine has two.
REFERENCE_MS = 9.0
# A limit is never shorter than on the reference machine, and never longer than four times that.
LEAST, MOST = 1.0, 4.0
# The shortest time counts; in the others the CPU had other work too.
_NUM_TRIES = 3


def slowness() -> float:
    """By what limits are multiplied: LEAST to MOST. Takes some 30 ms."""
    tokenizer = LLTokenizer("byte")
    return bounded(min(_seconds(tokenizer) for _ in range(_NUM_TRIES)) * 1e3 / REFERENCE_MS)


def bounded(ratio: float) -> float:
    """A measured ratio within its bounds, in steps of 0.01."""
    return round(min(max(ratio, LEAST), MOST), 2)


def _seconds(tokenizer: LLTokenizer) -> float:
    begun = time.thread_time()
    LLMatcher(tokenizer, _GRAMMAR, log_level=0).compute_bitmask()
    return time.thread_time() - begun
