"""The pages that a worker's own plans name before it serves, and where they lie in a pool.

Until a GPU worker gets requests, only these pages have memory: two whole pools do not fit one card. Pages of a head are
consecutive, heads are not, so each head of each tensor has pieces of its own.
"""

from collections.abc import Iterator, Sequence

from gpu_worker.geometry import Geometry, align_up

PAGES_AT_ONCE = 4
"""Pages whose checksums are computed at once. Each takes the bytes of one head's page, in all layers."""
# Texts of the self-check (`compatibility/self_check.py`) with their decode steps, and pages that are copied to time it
# (`timings.py`). A test compares all such plans with `num_first_pages`.
_CHECKED_TEXTS, _CHECKED_TOKENS, _TIMED_PAGES = 2, 320, 8


def num_first_pages(geometry: Geometry) -> int:
    """The pages 0 to n - 1 that plans of the warm-up, the self-check, timings and the probation name, n at most."""
    of_checks = _CHECKED_TEXTS * align_up(_CHECKED_TOKENS, geometry.page_size) // geometry.page_size
    prompts = -(-geometry.token_budget // geometry.max_length)
    of_prompts = align_up(geometry.token_budget, geometry.page_size) // geometry.page_size + prompts
    return min(geometry.num_pages, 1 + max(of_checks, of_prompts, _TIMED_PAGES))


def piece_offsets(
    shapes: Sequence[tuple[int, int, int]],
    starts: Sequence[int],
    *,
    itemsize: int,
    geometry: Geometry,
    granularity: int,
) -> list[int]:
    """Offsets of the pieces, of one granule each, that hold the first pages of every head.

    shapes: (heads, tokens, dimension) of each tensor, which starts at the byte of `starts`.
    """
    num_pages = num_first_pages(geometry)
    pieces: set[int] = set()
    for shape, start in zip(shapes, starts, strict=True):
        for begin, end in _ranges(shape, start, itemsize, num_pages, geometry):
            pieces.update(range(begin // granularity, -(-end // granularity)))
    return [granularity * piece for piece in sorted(pieces)]


def _ranges(
    shape: tuple[int, int, int], start: int, itemsize: int, num_pages: int, geometry: Geometry
) -> Iterator[tuple[int, int]]:
    """The bytes of each head's first pages, and of the page behind the last one that learned sinks have."""
    heads, tokens, dimension = shape
    head_bytes, page_bytes = (count * dimension * itemsize for count in (tokens, geometry.page_size))
    for head in range(heads):
        first = start + head * head_bytes
        yield first, first + num_pages * page_bytes
        if tokens > geometry.num_pages * geometry.page_size:
            yield first + geometry.num_pages * page_bytes, first + head_bytes
