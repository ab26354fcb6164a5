"""Who goes first, who gives way, what stays free, what is saved: pure functions, each of one idea.

Owns nothing. One `queue_key`, one `victim_key`; everything that orders requests uses them. What does not gain 5 % on a
trace of the simulator is not here.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.config import Admission
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.request_queue import Schedulable, queue_key
from scheduler_svc.core.state.rows import Rows

MAX_PASSED_OVER = 32
"""So many may go before one that stands ahead of them."""
WATERMARK = 0.01
NEAR_STEPS = 16
"""Steps over which the running rows' pages are counted exactly, at most a page of them. The estimate is right for what
comes after; a whole page of 128 tokens for each row would leave a tenth of a tight pool idle."""


def victim_key(request: Schedulable) -> tuple[int, int]:
    """Largest first: the reverse of the queue's order, so the request at the head of the order always keeps its pages
    and something always progresses."""
    return queue_key(request)


def chunk_tokens(*, remaining: int, budget: int, align: int) -> int:
    """Tokens of a prompt chunk when `remaining` positions are open and `budget` is left; 0 where none fit.

    A chunk is charged rounded up to `align`, so one that does not reach the end is a multiple of it.
    """
    if -(-remaining // align) * align <= budget:
        return remaining
    return budget // align * align


def swapping_pays(info: WorkerInfo) -> bool:
    """Whether moving a page to host memory and back costs less than computing its tokens again."""
    return info.host_pages > 0 and 2 * info.page_copy_us < info.page_size * info.token_us


# What stays free -------------------------------------------------------------------------------------------------


def headroom(admission: Admission, rows: Rows, info: WorkerInfo, expected_share: float) -> int:
    """Pages that must stay free beside those that a request needs at once; none where nobody runs."""
    if not rows.num_seated or admission is Admission.KNOWN:
        return 0
    if admission is Admission.WATERMARK:
        return max(1, round(WATERMARK * info.usable_pages))
    seated = rows.seated()
    near = pages_of_next_steps(rows, seated, info.page_size, min(NEAR_STEPS, info.page_size))
    return max(near, _expected(rows, seated, info, expected_share))


def headroom_bound(admission: Admission, rows: Rows, info: WorkerInfo, expected_share: float) -> int:
    """No less than `headroom`, in O(1): where so much is free, nobody needs to count."""
    if admission is not Admission.HORIZON:
        return headroom(admission, rows, info, expected_share)
    # In so few steps a row crosses one page edge at most.
    return max(rows.num_seated, int(rows.remaining_bound * expected_share) // info.page_size)


def pages_of_next_steps(rows: Rows, seated: npt.NDArray[np.int64], page_size: int, steps: int) -> int:
    """The most pages that the seated rows take together within so many steps, at most `page_size`, exactly.

    Each row crosses one page edge at most in that time; one that ends by its length gives back what it held.
    O(rows + steps).
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
    """Pages that the seated rows will take if each says that share of what it may yet say (SGLang's estimate)."""
    begins = np.maximum(rows.planned[seated], rows.known[seated])
    left = rows.last[seated] - begins
    if info.window:
        # Further on, each gives up a page for one that it takes.
        left = np.minimum(left, np.maximum(info.window + info.sink_tokens - begins, 0))
    return int(left.sum() * share) // info.page_size
