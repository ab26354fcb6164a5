"""Four layouts of the KV cache in one memory: a reservation, a growing extent, pages, shared pages; what they hold.

Memory is counted in token slots. One slot holds the K/V of one token, in all layers. At all times `reserved + free +
overhead = total` and `used <= reserved`.

The sequences depend on the settings alone, so every layout gets the same ones.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.page_hash import HASH_BYTES, hash_pages, prefix_root
from scheduler_svc.core.pages.page_pool import PagePool
from scheduler_svc.simulator.hardware import MODELS
from tandem_contract.plural import counted
from tandem_contract.settings import file, number, one_of

_NAMES = ("contiguous", "growing", "paged", "shared")
_ROOT = prefix_root(bytes(8), "")
_VOCABULARY = 32_000
_MAX_LENGTH = 1_048_576
# The tokens of all sequences of one run. Each of them is a call into the layout.
_MAX_TOTAL_TOKENS = 20_000_000


class Settings(BaseModel):
    """The default is 100 clients that send three sequences each. Lengths are tokens, prompt included."""

    model_config = ConfigDict(frozen=True)

    sequences: int = number(100, 1, 100_000, "N", "sequences that want to run at once")
    lives: int = number(3, 1, 10_000, "N", "sequences per client, one after another")
    min_length: int = number(100, 2, _MAX_LENGTH, "N", "tokens of the shortest sequence")
    max_length: int = number(3000, 2, _MAX_LENGTH, "N", "tokens of the longest sequence")
    prompt_share: float = number(0.5, 0, 1, "SHARE", "share of a sequence that is prompt; the rest is generated")
    gap: float = number(4.0, 0, 1_000_000, "STEPS", "mean gap between the first arrivals")
    reserve: int = number(4096, 2, _MAX_LENGTH, "N", "longest sequence served; the contiguous layout reserves it")
    memory_tokens: int = number(65_536, 2, 16_777_216, "N", "memory, as the number of tokens with K/V in it")
    page_size: int = number(16, 1, 4096, "N", "tokens per page")
    growth: float = number(1.5, 1, 16, "X", "factor by which the growing layout enlarges a full extent")
    prefix_groups: int = number(4, 0, 100_000, "N", "shared prefixes of prompts; 0: none")
    prefix_length: int = number(512, 0, _MAX_LENGTH, "N", "tokens of each prefix")
    seed: int = number(0, 0, 2**63 - 1, "N", "seed of all random draws")
    model: Annotated[str, one_of(MODELS)] = Field("llama-3.1-8b", title="NAME", description=", ".join(MODELS))
    element_bytes: int = number(2, 1, 16, "N", "bytes per number of the K/V")
    memory: Annotated[str, one_of([*_NAMES, "all"])] = Field(
        "all", title="LAYOUT", description=f"memory layout: {', '.join(_NAMES)} or all"
    )
    png: Path | None = file("draw the memory of each layout over time")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V, in all layers."""
        return MODELS[self.model].kv_values * self.element_bytes

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        # One page besides the padding page.
        least, total = 2 * self.page_size, self.sequences * self.lives * self.max_length
        if self.min_length > self.max_length:
            raise ValueError(f"--min-length is {self.min_length}; it must be at most --max-length {self.max_length}")
        if self.memory_tokens < least:
            raise ValueError(f"--memory-tokens is {self.memory_tokens}; it must be at least {least} (two pages)")
        if total > _MAX_TOTAL_TOKENS:
            what = f"--sequences × --lives × --max-length is {counted(total, 'token')}"
            raise ValueError(f"{what}; it must be at most {_MAX_TOTAL_TOKENS:,}")
        return self


@dataclass(frozen=True, slots=True)
class Sequence:
    """`tokens` int32[length] holds the `prompt` tokens and those that are generated after them."""

    index: int
    prompt: int
    tokens: Int32Array

    @property
    def length(self) -> int:
        """Tokens at the sequence's end."""
        return len(self.tokens)


def draw(settings: Settings) -> tuple[list[list[Sequence]], list[int]]:
    """Returns the sequences of each client, one after another, and the steps at which the clients send their first."""
    rng, count = np.random.default_rng(settings.seed), settings.sequences
    prefixes = rng.integers(0, _VOCABULARY, (settings.prefix_groups, settings.prefix_length), np.int32)
    gaps = rng.exponential(settings.gap, count) if settings.gap else np.zeros(count)
    # The first client starts at step 0.
    arrivals = [int(step) for step in np.cumsum(gaps) - gaps[0]]
    clients: list[list[Sequence]] = [[] for _ in range(count)]
    # Round by round, so that more rounds add sequences and leave the first ones as they were.
    for index in range(settings.lives * count):
        prefix = prefixes[int(rng.integers(settings.prefix_groups))] if settings.prefix_groups else prefixes.ravel()
        length = int(rng.integers(settings.min_length, settings.max_length, endpoint=True))
        # At least one token is prompt and one is generated.
        prompt = min(max(1, round(length * settings.prompt_share)), length - 1)
        tokens = np.concatenate([rng.integers(0, _VOCABULARY, n, np.int32) for n in (prompt, length - prompt)])
        shared = min(len(prefix), prompt)
        tokens[:shared] = prefix[:shared]
        clients[index % count].append(Sequence(index, prompt, tokens))
    return clients, arrivals


@dataclass(slots=True)
class Held:
    """What one sequence holds: `capacity` slots, from `start` on or in `pages`, for `length` tokens."""

    length: int
    capacity: int
    start: int = 0
    pages: list[int] = field(default_factory=list[int])


class Layout(ABC):
    """Memory of `total` slots. A sequence is admitted with its tokens, grows by one at a time, and is released."""

    def __init__(self, settings: Settings) -> None:
        self.total = settings.memory_tokens
        self.held: dict[int, Held] = {}
        # Slots that no sequence can ever hold.
        self.overhead = 0
        # Tokens of the longest sequence that fits into the empty memory.
        self.longest = min(settings.reserve, self.total)
        # How often tokens were copied to other slots, and how many; how often enough slots were free, but not in a row.
        self.moves = self.moved = self.refused_by_fragmentation = 0

    @property
    @abstractmethod
    def free(self) -> int:
        """Slots that no sequence holds and any could."""

    @property
    def reserved(self) -> int:
        """Slots that sequences hold. Shared slots count once."""
        return self.total - self.overhead - self.free

    @property
    def saved(self) -> int:
        """Slots that the same sequences would hold besides, without sharing."""
        return sum(held.capacity for held in self.held.values()) - self.reserved

    @property
    def used(self) -> int:
        """Reserved slots that hold a token. Shared slots, which are full, count once."""
        return sum(held.length for held in self.held.values()) - self.saved

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


class Growing(Layout):
    """One extent per sequence, allocated first fit with the slots of its tokens, which grows as a list does.

    A full extent takes slots from the hole behind it. Without such a hole it moves with all its tokens into the first
    hole that holds it with room to grow, or else into the first that holds one more token. While an extent moves it
    holds both places.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._growth, self._reserve = settings.growth, 0
        # Byte 1 is a free slot.
        self._slots = bytearray(b"\1" * self.total)

    @property
    def free(self) -> int:
        return self._slots.count(1)

    def admit(self, sequence: Sequence, length: int) -> int | None:
        capacity = self._reserve or length
        start = self._take_first(capacity)
        if start < 0:
            self.refused_by_fragmentation += self.free >= capacity
            return None
        self.held[sequence.index] = Held(length, capacity, start)
        return 0

    def grow(self, sequence: Sequence) -> bool:
        extent = self.held[sequence.index]
        if extent.length == extent.capacity and not self._enlarge(extent):
            return False
        extent.length += 1
        return True

    def release(self, sequence: Sequence) -> None:
        self._give(self.held.pop(sequence.index))

    def largest_hole(self) -> int:
        return max(map(len, re.findall(b"\1+", self._slots)), default=0)

    def _take_first(self, count: int) -> int:
        """Takes the lowest `count` slots in a row. Returns their start, or -1 if no run is so long."""
        start = self._slots.find(b"\1" * count)
        if start >= 0:
            self._slots[start : start + count] = bytes(count)
        return start

    def _give(self, extent: Held) -> None:
        self._slots[extent.start : extent.start + extent.capacity] = b"\1" * extent.capacity

    def _enlarge(self, extent: Held) -> bool:
        end, least = extent.start + extent.capacity, extent.capacity + 1
        target = min(self.longest, max(least, int(extent.capacity * self._growth)))
        if behind := len(self._slots[end : extent.start + target].partition(b"\0")[0]):
            self._slots[end : end + behind] = bytes(behind)
            extent.capacity += behind
            return True
        for capacity in (target, least):
            if (start := self._take_first(capacity)) >= 0:
                self._give(extent)
                extent.start, extent.capacity = start, capacity
                self.moves += 1
                self.moved += extent.length
                return True
        # It needs only one more slot, but all of them in one run.
        self.refused_by_fragmentation += self.free >= 1
        return False


class Contiguous(Growing):
    """A fixed reservation for every sequence, with the slots of the longest one."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._reserve = settings.reserve
        self.overhead = self.total % self._reserve
        del self._slots[self.total - self.overhead :]
        self.longest = self._reserve if self._slots else 0

    def largest_hole(self) -> int:
        return self.free


class Paged(Layout):
    """Pages of the core's own pool, any of which fits any sequence.

    Page 0, the pool's padding page, is overhead, as is the memory behind the last whole page.
    """

    shares: ClassVar[bool] = False
    """Whether sequences share pages. Hashes, index and eviction are the core's own: a full page is cached by the hash
    of all tokens up to its end. At least one token of a sequence is computed, in a page that only it holds, so a cached
    page is never written again."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._size = settings.page_size
        self._pool = PagePool(self.total // self._size)
        self.overhead = self.total - (self._pool.num_pages - 1) * self._size
        self.longest = min(self.longest, self.total - self.overhead)
        # By sequence: its pages' hashes, and its tokens as int32.
        self._hashed: dict[int, tuple[bytes, bytes]] = {}

    @property
    def free(self) -> int:
        return self.total - self.overhead - self._pool.num_used * self._size

    def admit(self, sequence: Sequence, length: int) -> int | None:
        size, cached = self._size, range((length - 1) // self._size if self.shares else 0)
        hits = list(takewhile(bool, (self._pool.find(*self._key(sequence, i)) for i in cached)))
        # Held before the allocation, which could otherwise evict a hit.
        for page in hits:
            self._pool.share(page)
        pages = self._pool.allocate(-(-length // size) - len(hits))
        if pages is None:
            self._pool.release(hits)
            return None
        self.held[sequence.index] = Held(length, size * (len(hits) + len(pages)), pages=hits + pages)
        for i in range(len(hits), length // size):
            self._filled(sequence, i, pages[i - len(hits)])
        return len(hits) * size

    def grow(self, sequence: Sequence) -> bool:
        table = self.held[sequence.index]
        if table.length % self._size == 0:
            if (page := self._pool.allocate(1)) is None:
                return False
            table.pages += page
            table.capacity += self._size
        table.length += 1
        if table.length % self._size == 0:
            self._filled(sequence, len(table.pages) - 1, table.pages[-1])
        return True

    def release(self, sequence: Sequence) -> None:
        self._pool.release(self.held.pop(sequence.index).pages)

    def _filled(self, sequence: Sequence, index: int, page: int) -> None:
        """The page has the last of its tokens."""
        if self.shares:
            self._pool.cache(page, *self._key(sequence, index))

    def _key(self, sequence: Sequence, index: int) -> tuple[bytes, bytes]:
        """Returns the hash and the tokens of a full page."""
        if sequence.index not in self._hashed:
            chain = hash_pages(_ROOT, sequence.tokens, self._size)
            self._hashed[sequence.index] = chain, sequence.tokens.astype("<i4", copy=False).tobytes()
        (chain, tokens), size = self._hashed[sequence.index], 4 * self._size
        return chain[index * HASH_BYTES : (index + 1) * HASH_BYTES], tokens[index * size : (index + 1) * size]


class Shared(Paged):
    """The same, with equal beginnings of sequences held once."""

    shares = True


LAYOUTS: dict[str, type[Layout]] = dict(zip(_NAMES, (Contiguous, Growing, Paged, Shared), strict=True))
"""In the order of the report."""
