"""The time limits of constraints in a worker, in seconds of the worker's clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a mask server may take."""

    # For one mask, and for the tokens that the row takes before it.
    mask: float = 0.25
    # For a constraint: compiling it, and its first mask.
    prepare: float = 2.0
    # The same for one that was within the limit before, while rows wait for it.
    define: float = 4.0
    # For the start of the process: imports, and the tokenizer of the largest vocabularies.
    start: float = 60.0
    # For a server that rows wait for and that computes nothing.
    idle: float = 2.0


DEFAULT_LIMITS = Limits()
