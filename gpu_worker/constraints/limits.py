"""The limits of constraints in a worker, and how a refusal tells them.

Limits are in CPU time of the thread that computes, in seconds of the reference machine (`speed.py`): a machine that is
busy or slow refuses nothing that a quiet one takes. Wall time only ends what sleeps.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a mask server may take, in seconds."""

    # CPU time of one mask, and of the tokens that the row takes before it.
    mask: float = 0.25
    # CPU time of a constraint: compiling it, and its first mask.
    prepare: float = 2.0
    # The same for one that was within the limit before, while rows wait for it.
    define: float = 4.0
    # Wall time, as a multiple of each of these limits: a server that does not get so little CPU time is replaced.
    patience: float = 10.0
    # Wall time of a server that rows wait for and that computes nothing.
    idle: float = 5.0
    # Wall time of the start of the process: imports, and the tokenizer of the largest vocabularies.
    start: float = 60.0


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
        limit = (
            f"{_shown(self.limit * self.slowness)} of CPU time ({_shown(self.limit)} x {self.slowness:g}, for the speed"
        )
        took = f"took {_shown(self.cpu)} of CPU time"
        if not self.is_of_cpu:
            took += f" in {_shown(self.wall)} and was not done, because the machine is busy"
        return f"{took}; the limit is {limit} of this machine)"


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
