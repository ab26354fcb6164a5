"""The blocks that a step's decode slots list and the pages that its prefill tiles list.

They are numpy arrays on the host and tensors on the device.

Owns these types, one object per attention pattern. Imports no torch, so that the host's layout needs none.
"""

from dataclasses import dataclass
from typing import Generic

from gpu_worker.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks(Generic[Array]):
    """The blocks of each decode slot; all int64 [slots]."""

    # Listed blocks, that of learned sinks included; 0 for an idle slot.
    num_blocks: Array
    # None without a window. The blocks left out between those of the sink tokens and those of the window.
    skipped: Array | None = None
    # Token slots gap_start to gap_end - 1 of the window's first block are hidden.
    gap_start: Array | None = None
    gap_end: Array | None = None
    # None unless sink tokens end inside a block. Token slots of that block that are hidden.
    sink_gap_start: Array | None = None
    sink_gap_end: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBlocks(Generic[Array]):
    """The pages of each of nq query tiles."""

    # int64 [nq]: pages that every query of the tile sees whole.
    num_full: Array
    # int64 [nq], None without a window: the pages left out between those of the sink tokens and those of the window.
    skipped: Array | None = None
    # int64 [nq] and [nq, w]: the other pages that some query sees, cut by position; that of learned sinks is one.
    num_partial: Array
    partial_pages: Array
