"""One step's order to a worker, and the core's memory of it while it is in flight.

A plan is complete and immutable once it is returned: arrays are made for it and never touched again.
Knows nothing of how it is encoded.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import NO_PAGES, Int32Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageMoves:
    """Contents of pages on their way, before anything of the step is written; all int32.

    `saved_pages[i]` goes to host page `saved_slots[i]`, first of all; the first `copied_tokens[i]` slots of page
    `copied_from[i]` to `copied_to[i]`; host page `loaded_slots[i]` to page `loaded_pages[i]`.
    """

    saved_pages: Int32Array = field(default_factory=lambda: NO_PAGES)
    saved_slots: Int32Array = field(default_factory=lambda: NO_PAGES)
    copied_from: Int32Array = field(default_factory=lambda: NO_PAGES)
    copied_to: Int32Array = field(default_factory=lambda: NO_PAGES)
    copied_tokens: Int32Array = field(default_factory=lambda: NO_PAGES)
    loaded_slots: Int32Array = field(default_factory=lambda: NO_PAGES)
    loaded_pages: Int32Array = field(default_factory=lambda: NO_PAGES)


NOTHING_MOVES = PageMoves()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStart:
    """A row in full: new, or resumed. `tokens` int32[known], `pages` int32[pages] in logical order, 0 behind a window.

    Pages before `first_position` come filled. `sampling`, `num_logprobs` and `prompt_logprobs_from` are as in `Submit`.
    """

    row: int
    tokens: Int32Array
    pages: Int32Array
    first_position: int
    num_prompt_tokens: int
    sampling: bytes
    sample_idx: int
    banned_until: int
    banned: tuple[int, ...]
    num_logprobs: int
    prompt_logprobs_from: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The order for one model forward; worker.proto says what each part means.

    Rows and pages are int32. `chunk_samples` is 1 where a chunk reaches the last known token. Sampled rows, the order
    of a result's tokens: chunks that sample, then decode rows.
    """

    generation: int
    step: int
    checksum: int
    zero_pages: Int32Array
    starts: tuple[RowStart, ...]
    append_rows: Int32Array
    append_pages: Int32Array
    chunk_rows: Int32Array
    chunk_starts: Int32Array
    chunk_counts: Int32Array
    chunk_samples: npt.NDArray[np.uint8]
    decode_rows: Int32Array
    moves: PageMoves = NOTHING_MOVES


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPromptLogprobs:
    """Logprobs that a chunk will bring: of the prompt positions `start` to `start + count - 1`, with `top_k` others."""

    handle: int
    start: int
    count: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentPlan:
    """What a sent plan will be read against when its result comes, whatever happened to the rows since.

    `rows`, `handles`, `ends` name every row of the plan: whose it was and the first position after those computed.
    `sampled` are indices into them, in the order of the result's tokens. `prefill_tokens` are those of its chunks,
    `decode_tokens` one per decode row. `num_logprobs` int32[sampled] is what each sampled row wants, None where all
    want none; `wanted_prompt_logprobs` are in the order of the chunks. `cached` are the pages,
    with their hashes, that are in the prefix cache because this plan fills them; `swapped_out` are the hashes of the
    pages that it copies to host memory. Both are void if the plan is.
    """

    step: int
    sent_at: float
    rows: Int32Array
    handles: Int64Array
    ends: Int32Array
    sampled: Int64Array
    prefill_tokens: int
    decode_tokens: int
    num_logprobs: Int32Array | None
    wanted_prompt_logprobs: tuple[WantedPromptLogprobs, ...]
    cached: tuple[tuple[int, bytes], ...]
    swapped_out: tuple[bytes, ...]
