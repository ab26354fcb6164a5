"""The interface of a memory layout and its counters.

Memory is counted in token slots. One slot holds the K/V of one token, in all layers. At all times
`reserved + free + overhead = total` and `used <= reserved`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Sequence


class Layout(ABC):
    """Memory of `total` slots. A sequence is admitted with its tokens, grows by one at a time, and is released."""

    name: ClassVar[str]

    def __init__(self, settings: Settings) -> None:
        self.total = settings.memory_tokens
        self.overhead: int = 0
        """Slots that no sequence can ever hold."""
        self.reserved: int = 0
        """Slots that sequences hold. Shared slots count once."""
        self.used: int = 0
        """Reserved slots that hold a token. Shared slots count once."""
        self.saved: int = 0
        """Slots that sharing saves: the same sequences would hold this many more without it."""
        self.moves: int = 0
        """How often tokens were copied to other slots."""
        self.moved: int = 0
        """Tokens copied to other slots."""
        self.refused_by_fragmentation: int = 0
        """How often enough slots were free, but not in one run."""

    @property
    def free(self) -> int:
        """Slots that no sequence holds and any could."""
        return self.total - self.overhead - self.reserved

    @property
    def cached(self) -> int:
        """Free slots with tokens that the prefix cache can still find."""
        return 0

    @abstractmethod
    def could_ever_hold(self, length: int) -> bool:
        """Whether a sequence of `length` tokens fits into the empty memory."""

    def prepare(self, sequence: Sequence) -> None:  # noqa: B027 - most layouts prepare nothing
        """Does the work of a sequence's arrival, before its first admission."""

    @abstractmethod
    def admit(self, sequence: Sequence, length: int) -> int | None:
        """Allocates slots for the first `length` tokens. Returns how many were cached, or None if they do not fit."""

    @abstractmethod
    def grow(self, sequence: Sequence) -> bool:
        """Allocates a slot for the next token. Returns False and changes nothing if the memory is full."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Releases the slots of a sequence that ends or is preempted."""

    def largest_hole(self) -> int:
        """Returns the most free slots that one sequence could get: all of them, unless they must be contiguous."""
        return self.free
