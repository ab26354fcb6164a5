"""Small memories and sequences for these tests, and an audit of a layout's counters against its extents."""

import numpy as np

from scheduler_svc.simulator.layouts import Contiguous, Layout, Paged, Sequence, Settings, Shared


def sequence(index: int, tokens: list[int], *, prompt: int = 1) -> Sequence:
    return Sequence(index, prompt, np.array(tokens, np.int32))


def settings(**changes: object) -> Settings:
    """Returns the smallest settings, with the changes."""
    small: dict[str, object] = {
        "sequences": 1, "lives": 1, "min_length": 2, "max_length": 2, "reserve": 12, "memory_tokens": 24,
        "page_size": 4, "growth": 2.0, "prefix_groups": 0,
    }  # fmt: skip
    return Settings(**{**small, **changes})  # type: ignore[arg-type]


Extents = list[tuple[int, int]]
"""Runs of slots as [start, end), in the order of the tokens in them."""


def extents_of(layout: Layout) -> dict[int, Extents]:
    """Returns the slots that each sequence holds, by its index."""
    found: dict[int, Extents] = {}
    for index, held in layout.held.items():
        size = held.capacity // max(1, len(held.pages))
        starts = [page * size for page in held.pages] if held.pages else [held.start]
        found[index] = [(start, start + size) for start in starts]
    return found


def lengths_of(layout: Layout) -> dict[int, int]:
    """Returns the tokens of each sequence."""
    return {index: held.length for index, held in layout.held.items()}


def covered(extents: Extents) -> list[int]:
    """Returns the slots in the order of the extents."""
    return [slot for start, end in extents for slot in range(start, end)]


def audit(layout: Layout, asked: Settings) -> None:
    """Asserts that the layout's counters equal what its extents yield."""
    extents, lengths = extents_of(layout), lengths_of(layout)
    assert extents.keys() == lengths.keys()
    is_paged = isinstance(layout, Paged)
    held: set[int] = set()
    total_held = 0
    for runs in extents.values():
        slots = covered(runs)
        assert len(set(slots)) == len(slots), "one sequence holds a slot twice"
        if not isinstance(layout, Shared):
            assert held.isdisjoint(slots), "two sequences hold a slot"
        held.update(slots)
        total_held += len(slots)
    assert held <= set(range(layout.total))
    assert layout.reserved == len(held)
    assert layout.saved == total_held - len(held)
    assert layout.reserved + layout.free + layout.overhead == layout.total
    if is_paged:
        assert held.isdisjoint(range(asked.page_size)), "the padding page is held"
    written: set[int] = set()
    for index, runs in extents.items():
        slots, length = covered(runs), lengths[index]
        if is_paged:
            assert len(runs) == -(-length // asked.page_size)
        assert length <= len(slots)
        written.update(slots[:length])
    assert layout.used == len(written)
    assert layout.largest_hole() == largest_hole(layout, held)


def largest_hole(layout: Layout, held: set[int]) -> int:
    """Returns the longest run of free slots, or all free slots of a layout without extents."""
    if isinstance(layout, Contiguous | Paged):
        return layout.free
    longest = run = 0
    for slot in range(layout.total):
        run = 0 if slot in held else run + 1
        longest = max(longest, run)
    return longest
