"""The plan of one step, which the core sends to a worker, and the record that the core keeps until the result arrives.

Both are immutable, including their arrays. `worker.proto` specifies the encoded plan and the order in which a worker
applies its parts.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array, Int64Array, RowIndex
from scheduler_svc.core.messages.resources import Need


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageLabels:
    """Labels of n pages, in the order in which they were made."""

    pages: Int32Array
    """int32[n]."""
    hashes: tuple[bytes, ...]
    """The hash of each page (`page_hash`)."""
    tokens: tuple[bytes, ...]
    """The tokens of each page, little-endian int32."""
    forget: bool = False
    """Whether the worker drops all earlier labels first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPages:
    """The pages that a worker has kept since it lost its scheduler."""

    page_root: str
    """Names the root of the hashes (`page_hash.root_name`)."""
    generation: int
    """The newest generation with plans that may have changed the pages."""
    labels: PageLabels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageMoves:
    """Copies of page contents that the worker makes before it computes the step. All arrays are int32.

    Order: swap-outs, zeroing (`Plan.zero_pages`), copies, swap-ins.
    """

    saved_pages: Int32Array = field(default_factory=lambda: NO_IDS)
    """Page `saved_pages[i]` is swapped out to host page `saved_slots[i]`."""
    saved_slots: Int32Array = field(default_factory=lambda: NO_IDS)
    copied_from: Int32Array = field(default_factory=lambda: NO_IDS)
    """The first `copied_tokens[i]` slots of page `copied_from[i]` are copied to page `copied_to[i]`."""
    copied_to: Int32Array = field(default_factory=lambda: NO_IDS)
    copied_tokens: Int32Array = field(default_factory=lambda: NO_IDS)
    loaded_slots: Int32Array = field(default_factory=lambda: NO_IDS)
    """Host page `loaded_slots[i]` is swapped in to page `loaded_pages[i]`."""
    loaded_pages: Int32Array = field(default_factory=lambda: NO_IDS)


NOTHING_MOVES = PageMoves()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStart:
    """All that the worker needs to start a row, for a new or a resumed request. Later plans send only differences."""

    row: int
    tokens: Int32Array
    """int32[number of known tokens]: the prompt and the output so far."""
    pages: Int32Array
    """int32[number of pages], in logical order. 0 stands for a page behind the window, which is never read."""
    first_position: int
    """The first position to compute. The pages already hold the keys and values of the positions before it."""
    num_prompt_tokens: int
    sampling: bytes
    sample_idx: int
    banned_until: int
    """The `banned` tokens may not be sampled while the sequence is shorter than this (`min_new_tokens`)."""
    banned: tuple[int, ...]
    num_logprobs: int
    prompt_logprobs_from: int
    """The request wants prompt logprobs from this position on. 0 for none."""
    constraint: bytes = b""
    """Hash of the row's constraint; empty without one. The worker replays the output tokens that come with the row."""
    other_needs: tuple[Need, ...] = ()
    """What the row needs besides a constraint. The worker has prepared it, unless it blocks sampling only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """The pool of a lost worker, which takes the place of the worker's own pool before the plan is applied."""

    pool_id: bytes
    generation: int
    """No generation after this one has written to the pool."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One forward pass of the model: prompt chunks and decode rows, and the changes to the worker's row tables.

    The result has one token per chunk with `chunk_samples`, in the order of the chunks, then one per decode row.
    """

    generation: int
    """The lane's generation. A worker drops all rows when a plan of a newer generation arrives."""
    step: int
    """Number of the plan in its generation, from 1."""
    checksum: int
    """Checksum of the worker's row tables after this plan (`Rows.checksum`). If the worker's own checksum
    differs, it answers OUT_OF_SYNC."""
    zero_pages: Int32Array
    """Pages that the worker fills with zeros before it writes to them (`PagePool`, unverified pages)."""
    starts: tuple[RowStart, ...]
    append_rows: Int32Array
    """Row `append_rows[i]` gets page `append_pages[i]` as its next page."""
    append_pages: Int32Array
    chunk_rows: Int32Array
    """Row `chunk_rows[i]` computes `chunk_counts[i]` positions from `chunk_starts[i]` on."""
    chunk_starts: Int32Array
    chunk_counts: Int32Array
    chunk_samples: npt.NDArray[np.uint8]
    """1 if the chunk reaches the row's last known token, so that the row samples its next token. 0 otherwise."""
    decode_rows: Int32Array
    """Rows that compute one position, their next one, and sample a token."""
    moves: PageMoves = NOTHING_MOVES
    take_over: TakeOver | None = None
    labels: PageLabels | None = None
    """Labels of pages that earlier, confirmed steps filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPromptLogprobs:
    """Prompt logprobs that the result of a chunk contains: positions `start` to `start + count - 1`.

    Each comes with `top_k` alternatives. `handle` identifies the request.
    """

    handle: int
    start: int
    count: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentPlan:
    """The core's record of a plan in flight, which the core needs to apply the result.

    When the result arrives, a row may hold another request or none. A token therefore goes to the request with the
    recorded handle, not to the request that is in the row now.
    """

    step: int
    sent_at: float
    """On the core's clock."""
    rows: Int64Array
    """int64[n]: every row of the plan, chunks first, then decode rows."""
    index: RowIndex
    """`index_of(rows)`."""
    handles: Int64Array
    """int64[n]: the request in each row."""
    ends: Int32Array
    """int32[n]: the first position after those that the plan computes for the row."""
    sampled: Int64Array
    """int64[s]: indices into `rows` of the rows that sample, in the order of the result's tokens."""
    prefill_tokens: int
    """Number of positions in chunks."""
    decode_tokens: int
    """Number of decode rows. Each computes one position."""
    num_logprobs: Int32Array | None
    """int32[s]: `RowStart.num_logprobs` of each row that samples. None if no row wants logprobs."""
    wanted_prompt_logprobs: tuple[WantedPromptLogprobs, ...]
    """One entry per chunk with wanted prompt logprobs, in the order of the chunks."""
    cached: tuple[tuple[int, bytes], ...]
    """Page and hash of each page that entered the prefix cache because this plan fills it. If the plan becomes void,
    these pages are evicted."""
    swapped_out: tuple[bytes, ...]
    """Hashes of the pages that this plan swaps out. If the plan becomes void, their host pages are evicted."""
    moved_pages: int = 0
    """Number of pages that are swapped out, copied, or swapped in."""
    started_tokens: int = 0
    """Number of tokens that come with the started rows."""
    constrained: npt.NDArray[np.bool_] | None = None
    """bool[s]: whether the row has a constraint, for each row that samples. None if no row of the lane has one."""
    takes_over: bytes = b""
    """The id of the pool that the worker takes over with this plan, empty if it keeps its pool."""
