"""What every memory layout answers. Owns the interface and its counters; knows nothing of any one layout.

Memory is counted in token slots: one holds the K/V of one token, in all layers. For every layout and at every moment
`reserved + free + overhead = total` and `used <= reserved`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from scheduler_svc.kv_lab.settings import Settings
from scheduler_svc.kv_lab.workload import Sequence

Extents = list[tuple[int, int]]
"""Runs of slots, from the first to the one behind the last, in the order of the tokens in them."""


class Layout(ABC):
    """Memory of `total` slots. A sequence is admitted with the tokens it has, grows one at a time, and goes."""

    name: ClassVar[str]

    def __init__(self, settings: Settings) -> None:
        self.total = settings.memory_tokens
        self.overhead: int = 0
        """Slots that nobody can ever have."""
        self.reserved: int = 0
        """Slots that sequences hold, shared ones once."""
        self.used: int = 0
        """Reserved slots that hold a token, shared ones once."""
        self.saved: int = 0
        """Slots more that the same sequences would hold if none were shared."""
        self.moves: int = 0
        """Times that tokens were copied from one place to another."""
        self.moved: int = 0
        """Tokens copied from one place to another."""
        self.refused_by_fragmentation: int = 0
        """Times that enough slots were free and yet none could be had."""

    @property
    def free(self) -> int:
        """Slots that nobody holds and somebody could."""
        return self.total - self.overhead - self.reserved

    @property
    def cached(self) -> int:
        """Free slots whose tokens can still be hit."""
        return 0

    @abstractmethod
    def could_ever_hold(self, length: int) -> bool:
        """Whether a sequence of so many tokens fits when it is alone."""

    def prepare(self, sequence: Sequence) -> None:  # noqa: B027 - most have nothing to prepare
        """What is done once for a sequence, when it arrives and before it is admitted."""

    @abstractmethod
    def admit(self, sequence: Sequence, length: int) -> int | None:
        """Takes slots for its first `length` tokens; how many of them were there already; None, no change: no room."""

    @abstractmethod
    def grow(self, sequence: Sequence) -> bool:
        """Takes a slot for its next token; False, and no change, if there is none."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """It ends or is preempted: its slots are let go."""

    def largest_hole(self) -> int:
        """Free slots that one sequence can have; all of them, where any slot is as good as another."""
        return self.free

    @abstractmethod
    def extents(self) -> Mapping[int, Extents]:
        """The slots that each sequence holds, by its index. For audits and tests."""

    @abstractmethod
    def lengths(self) -> Mapping[int, int]:
        """The tokens that each sequence has, those behind the window too. For audits and tests."""
