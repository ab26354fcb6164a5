"""Computes the encoded size in bytes of a started row, and of the largest plan that a worker may get.

A started row carries all its tokens and pages (`StartedRows` in worker.proto), so a plan that starts many long rows
could exceed the largest frame that the worker accepts, which ends its connection. The results are upper bounds; tests
compare them with encoded plans.
"""

from scheduler_svc.core.messages.submit import MAX_SAMPLING_BYTES
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.request import Request

# Bytes of the scalars of one started row, and of the tags and lengths of its fields.
_ROW_BYTES = 176
# Bytes of a plan without its rows and pages.
_PLAN_BYTES = 4096
# Bytes that a row may have besides its tokens: its sampling, and the token ids banned before min_new_tokens.
_MAX_EXTRA_BYTES = MAX_SAMPLING_BYTES + 4 * (2 * 1024)
# A page may be zeroed (1 int32 value) and appended to a row (2).
_BYTES_PER_PAGE = 4 * (1 + 2)
# One page may be swapped out (2 int32 values), and one swapped in (2).
_BYTES_PER_HOST_PAGE = 4 * (2 + 2)
# A row has a chunk (row, start, count, whether it samples) and a copy (source, target, count), as int32 values.
_BYTES_PER_ROW = 4 * (4 + 3)


def start_bytes(request: Request, num_pages: int) -> int:
    """Returns an upper bound on the bytes that a plan needs to start the request with `num_pages` pages."""
    return _ROW_BYTES + 4 * (request.known + num_pages + len(request.banned)) + len(request.sampling)


def largest_plan_bytes(info: WorkerInfo, max_plan_bytes: int) -> int:
    """Returns an upper bound on the bytes of any plan for the worker if plans start rows up to `max_plan_bytes`."""
    longest_row = _ROW_BYTES + _MAX_EXTRA_BYTES + 4 * (info.max_length + -(-info.max_length // info.page_size))
    pages = _BYTES_PER_PAGE * info.num_pages + _BYTES_PER_HOST_PAGE * min(info.num_pages, info.host_pages)
    return _PLAN_BYTES + max(max_plan_bytes, longest_row) + _BYTES_PER_ROW * info.max_rows + pages
