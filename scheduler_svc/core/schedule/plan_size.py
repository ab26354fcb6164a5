"""Encoded size of a plan in bytes: what a started row adds, and the largest plan that a worker may get.

Owns the arithmetic and no state. A started row carries all its tokens and pages (`StartedRows` in worker.proto), so a
plan that starts many long rows could exceed the largest frame that the worker takes, which ends its connection. The
figures are upper bounds; tests compare them with encoded plans.
"""

from scheduler_svc.core.messages.events import MAX_SAMPLING_BYTES
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.request import Request

# Scalars of one started row, and the tags and lengths of the fields that hold them.
_ROW_BYTES = 144
# Everything of a plan but its rows and pages.
_PLAN_BYTES = 4096
# What a row may bring beside its sequence: its sampling, and the token ids that are banned before min_new_tokens.
_MAX_BESIDE_BYTES = MAX_SAMPLING_BYTES + 4 * (2 * 1024)
# int32 values of a page: zeroed; appended and its row.
_BYTES_PER_PAGE = 4 * (1 + 2)
# int32 values of a page that is swapped out (2) and one that is swapped in (2).
_BYTES_PER_HOST_PAGE = 4 * (2 + 2)
# int32 values of a row's chunk (row, start, count, whether it samples) and of a copy (source, target, count).
_BYTES_PER_ROW = 4 * (4 + 3)


def start_bytes(request: Request, num_pages: int) -> int:
    """Encoded bytes, at most, of starting the request with that many pages."""
    return _ROW_BYTES + 4 * (request.known + num_pages + len(request.banned)) + len(request.sampling)


def largest_plan_bytes(info: WorkerInfo, max_plan_bytes: int) -> int:
    """Encoded bytes, at most, of any plan for such a worker when rows are started up to `max_plan_bytes`."""
    longest_row = _ROW_BYTES + _MAX_BESIDE_BYTES + 4 * (info.max_length + -(-info.max_length // info.page_size))
    pages = _BYTES_PER_PAGE * info.num_pages + _BYTES_PER_HOST_PAGE * min(info.num_pages, info.host_pages)
    return _PLAN_BYTES + max(max_plan_bytes, longest_row) + _BYTES_PER_ROW * info.max_rows + pages
