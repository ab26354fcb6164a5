"""What a KV pool that outlives its worker takes on a GPU beside its pages.

A worker that waits to take a pool over has memory for its first pages (`shared_pool/first_pages.py`); that memory stays
free while it has a whole pool, because the worker after it needs it. Checksums need sums of a few pages.
"""

from dataclasses import replace

from gpu_worker.geometry import MAX_PAGE_IDS, Geometry
from gpu_worker.memory.costs import Costs
from gpu_worker.shared_pool.first_pages import PAGES_AT_ONCE, num_first_pages

# The granularity of memory of GPUs, so far of all of them.
GRANULE_BYTES = 2 << 20
# First pages begin and end within a granule. Learned sinks have a page of their own in one more, or in two.
_ENDS, _ENDS_OF_SINKS = 1, 2


def bytes_beside_pool(costs: Costs, geometry: Geometry) -> int:
    """The most bytes for any number of pages."""
    num_pages = num_first_pages(replace(geometry, num_pages=MAX_PAGE_IDS))
    total = 0
    for part in costs.slices:
        page_bytes = geometry.page_size * part.bytes_per_token
        granules = -(-num_pages * page_bytes // GRANULE_BYTES) + _ENDS + _ENDS_OF_SINKS * bool(part.extra_pages)
        total += part.tensors * (part.heads * granules * GRANULE_BYTES + (PAGES_AT_ONCE + 1) * page_bytes)
    return total
