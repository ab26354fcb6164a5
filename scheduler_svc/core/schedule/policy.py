"""Scheduling policies: which request is preempted, how large a chunk is, how many pages stay free, when to swap.

The functions are pure. All orders of requests are those of `queue/turns`.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.config import Admission
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.rows import Rows

MAX_PASSED_OVER = 32
"""How often a request may be overtaken in the queue."""
WATERMARK = 0.01
"""Share of the pool that stays free under the watermark policy."""
NEAR_STEPS = 16
"""Number of next steps for which the pages of running rows are counted exactly, limited to the page size. Counting a
whole page of 128 tokens for each row would leave a tenth of a tight pool idle."""

ENDING_SECONDS, ENDING_TOKENS = 0.05, 128
"""Once a prompt ends in a step, chunks of others join it only until the step's chunks take this time or have this many
tokens, whichever is more. See `ending_budget`."""


def chunk_tokens(*, remaining: int, budget: int, align: int) -> int:
    """Returns the size of a chunk, given the positions left to compute and the token budget; 0 if none fits.

    A chunk costs its size rounded up to `align`. A chunk that does not reach the end is a multiple of `align`. The
    budget is negative if the decode rows exceed it, which they may after a step ran out of memory.
    """
    if -(-remaining // align) * align <= budget:
        return remaining
    return max(0, budget) // align * align


def before_sampling(remaining: int, align: int) -> int:
    """Returns how many of a row's remaining positions, at least 1, it can compute in chunks without sampling."""
    return (remaining - 1) // align * align


def ending_budget(info: WorkerInfo, prompt_tokens: int) -> int:
    """Returns the largest token budget for further chunks in a step in which a prompt ends.

    The first token of a prompt comes with the end of its step, so it would wait for all other chunks in that step. They
    lose nothing in the next step, which has decode rows, too, if a step's time is proportional to its tokens, as it is
    from some `ENDING_TOKENS` on. A wait shorter than `ENDING_SECONDS` is not worth another step. `prompt_tokens` is the
    number of tokens of the step's chunks. Without a measured `token_us` there is no limit.
    """
    if not info.token_us:
        return info.token_budget
    return max(0, max(ENDING_TOKENS, int(1e6 * ENDING_SECONDS / info.token_us)) - prompt_tokens)


def swapping_pays(info: WorkerInfo) -> bool:
    """Returns whether copying a page to host memory and back costs less than computing its tokens again."""
    return info.host_pages > 0 and 2 * info.page_copy_us < info.page_size * info.token_us


def headroom(lane: Lane, admission: Admission) -> int:
    """Returns how many pages admission must leave free for the growth of running rows; 0 if no row runs."""
    rows, info = lane.rows, lane.info
    if not rows.num_seated or admission is Admission.KNOWN:
        return 0
    if admission is Admission.WATERMARK:
        return max(1, round(WATERMARK * info.usable_pages))
    seated = rows.seated()
    near = pages_of_next_steps(rows, seated, info.page_size, min(NEAR_STEPS, info.page_size))
    return max(near, _expected(rows, seated, info, lane.schedule.expected_share))


def headroom_bound(lane: Lane, admission: Admission) -> int:
    """Returns an upper bound on `headroom` in O(1). If it is free, the caller need not compute `headroom`."""
    if admission is not Admission.HORIZON:
        return headroom(lane, admission)
    # Within `NEAR_STEPS` a row crosses at most one page edge.
    rows = lane.rows
    return max(rows.num_seated, int(rows.remaining_bound * lane.schedule.expected_share) // lane.info.page_size)


def pages_of_next_steps(rows: Rows, seated: npt.NDArray[np.int64], page_size: int, steps: int) -> int:
    """Returns the largest number of pages that the seated rows need together within the next `steps` steps, exactly.

    `steps` is at most `page_size`, so each row crosses at most one page edge. A row that reaches its last position
    returns its pages. O(rows + steps).
    """
    begins = np.maximum(rows.planned[seated], rows.known[seated])
    left = rows.last[seated] - begins
    held = rows.num_pages[seated]
    crosses_at = np.maximum(held * page_size - begins, 0)
    takes = (crosses_at < steps) & (crosses_at < left)
    change = np.bincount(crosses_at[takes], minlength=steps + 1).astype(np.int64)
    ends = left <= steps
    if ends.any():
        returned = held[ends] + takes[ends]
        change -= np.bincount(np.maximum(left[ends], 0), weights=returned, minlength=steps + 1).astype(np.int64)
    return max(0, int(np.cumsum(change).max()))


def _expected(rows: Rows, seated: npt.NDArray[np.int64], info: WorkerInfo, share: float) -> int:
    """Returns how many pages the rows need if each produces `share` of its remaining tokens (SGLang's estimate)."""
    begins = np.maximum(rows.planned[seated], rows.known[seated])
    left = rows.expected(seated, begins)
    if info.window:
        # Beyond the window, a row frees a page for each one that it allocates.
        left = np.minimum(left, np.maximum(info.window + info.sink_tokens - begins, 0))
    return int(left.sum() * share) // info.page_size
