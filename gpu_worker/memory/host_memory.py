"""Host memory: pages for KV that is swapped out, their buffers on the device, and weights that pass through it.

Knows nothing of the pool's own size.
"""

from gpu_worker.attention.passing import Passing
from gpu_worker.geometry import MAX_HOST_PAGES
from gpu_worker.memory.costs import CPU_RESERVE_BYTES, Costs
from gpu_worker.memory.pool import DoesNotFit, Pool
from gpu_worker.memory.sizes import readable, settable


def passing_bytes(num_pages: int, pool: Pool) -> int:
    """Bytes of the buffers on the device through which `num_pages` host pages pass."""
    page = pool.page_bytes
    return Passing.of(page, num_pages, on_cpu=pool.on_cpu).num_bytes(page) if num_pages else 0


def configured_host_pages(asked: int, pool: Pool, *, room: int, free_host: int, breakdown: str) -> int:
    """Pages of host memory for host_pool_bytes. Raises DoesNotFit, or ValueError for less than a page.

    room: bytes on the device beside the smallest pool; free_host: bytes of host memory if the device is a GPU;
    breakdown: a sentence about the other bytes on the device.
    """
    page = pool.page_bytes
    if asked < page:
        would = settable(page, at_least=True)
        raise ValueError(
            f"host_pool_bytes is {asked}, less than a page of {page} bytes; "
            f"set host_pool_bytes to {would} at least, or to 0"
        )
    num_pages = min(MAX_HOST_PAGES, asked // page)
    buffers = passing_bytes(num_pages, pool)
    if pool.on_cpu:
        fits, because = room - buffers, breakdown
    else:
        fits = free_host - CPU_RESERVE_BYTES
        because = f"of {readable(free_host)} free in host memory, {readable(CPU_RESERVE_BYTES)} are kept free"
        if buffers > room:
            fits, because = 0, f"its buffers take {readable(buffers)}, and {breakdown}"
    if num_pages * page > fits:
        raise DoesNotFit(
            f"host_pool_bytes {readable(asked)} does not fit: {because}; "
            f"host_pool_bytes {settable(fits if fits >= page else 0)} would fit"
        )
    return num_pages


def check_host_memory(costs: Costs, free_host: int) -> None:
    """Raises DoesNotFit if the weights exceed free host memory, through which weights for a GPU may have to pass."""
    if costs.weights > free_host:
        raise DoesNotFit(
            f"weights take {readable(costs.weights)} in {costs.dtype}, and without the package accelerate they are "
            f"loaded through host memory, where {readable(free_host)} are free; install accelerate"
        )
