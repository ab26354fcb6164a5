"""Chooses the static shapes for which kernels are compiled, by type of device."""

from dataclasses import dataclass

from gpu_worker.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes for which kernels exist."""

    # Attention slots of each decode kernel, ascending.
    decode_buckets: tuple[int, ...]
    # Query positions of each prefill kernel, ascending; the last holds the token budget.
    prefill_buckets: tuple[int, ...]
    # Tokens are padded to multiples of this, and samples to buckets, so that CUDA graphs can be added later. None on a
    # CPU: no padding, and the single decode kernel has an attention slot for every row and reads the page table itself.
    token_multiple: int | None

    @classmethod
    def for_device(cls, geometry: Geometry, *, on_cpu: bool) -> "Shapes":
        """Returns one shape on a CPU, because idle slots cost nothing there, and buckets of rows on other devices."""
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
    """Returns the smallest of `buckets` that is at least `need`."""
    return next(size for size in buckets if size >= need)
