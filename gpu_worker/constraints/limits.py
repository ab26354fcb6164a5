"""The limits of constraints in a worker, and how a refusal tells them.

Limits are in CPU time of the thread that computes. Wall time only ends what sleeps.
"""

from dataclasses import dataclass

from tandem_contract.grammars import COMPILE_SECONDS, MASK_SECONDS, START_SECONDS, limit_words, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a mask server may take, in seconds."""

    # CPU time of one mask, and of the tokens that the row takes before it.
    mask: float = MASK_SECONDS
    # CPU time of a constraint: compiling it, and its first mask.
    prepare: float = COMPILE_SECONDS
    # The same for one that was within the limit before, while rows wait for it.
    define: float = 4.0
    # Wall time, as a multiple of each of these limits: a server that does not get so little CPU time is replaced.
    patience: float = 10.0
    # Wall time of a server that rows wait for and that computes nothing.
    idle: float = 5.0
    # Wall time of the start of the process.
    start: float = START_SECONDS


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that was exceeded. Times in seconds."""

    cpu: float
    wall: float
    limit: float
    # By what the limit was multiplied, because this machine is slower than the reference.
    slowness: float

    @property
    def is_of_cpu(self) -> bool:
        """Whether it was CPU time. Otherwise the thread slept, or the machine was busy."""
        return self.cpu > self.limit * self.slowness

    @property
    def words(self) -> str:
        """What was measured, and the limit."""
        took = f"took {shown(self.cpu)} of CPU time"
        if not self.is_of_cpu:
            took += f" in {shown(self.wall)} and was not done, because the machine is busy"
        return f"{took}; {limit_words(self.limit, self.slowness)}"
