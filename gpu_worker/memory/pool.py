"""The KV pool's arithmetic: bytes of pages, pages of bytes, the largest pool, and a pool of a configured size.

Knows nothing of other uses of memory.
"""

from dataclasses import dataclass

from gpu_worker.geometry import MAX_PAGE_IDS
from gpu_worker.memory.costs import Costs
from gpu_worker.memory.sizes import readable, settable

WHY_CAPPED = "K (or V) of one layer must have fewer than 2^31 elements, or its decode kernel does not compile for a GPU"


class DoesNotFit(ValueError):
    """The configured size does not fit; the message names the value that would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Pools of one model at one page size."""

    costs: Costs
    page_size: int
    on_cpu: bool

    @property
    def page_bytes(self) -> int:
        """K and V of all layers in one page."""
        return self.page_size * self.costs.kv_per_token

    @property
    def max_pages(self) -> int:
        """The most pages that plans can name and, on a GPU, that kernels can address."""
        return MAX_PAGE_IDS if self.on_cpu else min(MAX_PAGE_IDS, self.costs.addressable_pages(self.page_size))

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of a pool of `num_pages`, with the additional pages of learned sinks."""
        return self.page_size * self.costs.learned_sinks_per_token + num_pages * self.page_bytes

    def fitting(self, num_bytes: int) -> int:
        """Pages of the largest pool that fits `num_bytes`."""
        return max(0, (num_bytes - self.num_bytes(0)) // self.page_bytes)


def configured_pages(num_pages: int | None, pool_bytes: int | None, pool: Pool, *, room: int, breakdown: str) -> int:
    """Pages of a pool with the size of one of the two settings. Raises DoesNotFit if it is too large, else ValueError.

    room: bytes available for the pool; breakdown: a sentence about the other bytes.
    """
    asked = f"num_pages is {num_pages}"
    if num_pages is None:
        assert pool_bytes is not None
        num_pages = pool.fitting(pool_bytes)
        asked = f"pool_bytes is {pool_bytes} ({num_pages} pages)"
        if num_pages < 2:
            raise ValueError(
                f"pool_bytes is {pool_bytes}, which is too small; the minimum is two pages of {pool.page_bytes} bytes: "
                f"pool_bytes {settable(pool.num_bytes(2), at_least=True)} would fit"
            )
        if pool.on_cpu:
            num_pages = min(num_pages, pool.max_pages)
    most = min(pool.max_pages, pool.fitting(room))
    would = f"pool_bytes {settable(pool.num_bytes(most))} or num_pages {most} would fit"
    if num_pages > pool.max_pages and not pool.on_cpu:
        raise DoesNotFit(f"{asked}; {WHY_CAPPED}: {would}")
    if pool.num_bytes(num_pages) > room:
        raise DoesNotFit(f"{asked}, which does not fit ({readable(pool.num_bytes(num_pages))}): {breakdown}; {would}")
    return num_pages
