"""The static shapes that kernels are compiled for. Owns the choice by device. Knows nothing of plans or torch."""

from dataclasses import dataclass

from gpu_worker.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes for which kernels exist."""

    # Decode slots of each decode kernel, ascending.
    decode_buckets: tuple[int, ...]
    # Query positions of each prefill kernel, ascending; the last holds the token budget.
    prefill_buckets: tuple[int, ...]
    # Tokens and samples are padded to multiples and buckets, so that graphs can be captured later. None: no
    # padding, and the single decode kernel has a slot for every row and reads the page table itself.
    token_multiple: int | None

    @classmethod
    def for_device(cls, geometry: Geometry, *, on_cpu: bool) -> "Shapes":
        """On a CPU one shape, because inactive slots cost nothing there; on other devices buckets of rows."""
        prefill = (geometry.prefill_tokens,)
        if on_cpu:
            every_row = geometry.max_rows + 1
            return cls(decode_buckets=(every_row,), prefill_buckets=prefill, token_multiple=None)
        powers = [1 << i for i in range(geometry.max_rows.bit_length()) if 1 << i < geometry.max_rows]
        return cls(
            decode_buckets=(*powers, geometry.max_rows),
            prefill_buckets=prefill,
            token_multiple=geometry.chunk_align,
        )


def bucket_for(buckets: tuple[int, ...], need: int) -> int:
    """The smallest of `buckets` that holds `need`."""
    return next(size for size in buckets if size >= need)
