"""Evicts cached pages whose content nobody may rely on, on the device and in host memory."""

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.pages.host_pool import HostPool
from scheduler_svc.core.pages.page_pool import PagePool
from scheduler_svc.core.state.request import Request


def evict_unverified(request: Request, pool: PagePool, host: HostPool) -> None:
    """Evicts the unverified pages of a request with non-finite logits."""
    for page_hash in request.page_hashes:
        page = pool.page_with_hash(page_hash)
        if page and pool.is_unverified(page):
            pool.evict(page)
        if host.is_unverified(page_hash):
            host.evict(page_hash)


def evict_pages_of(record: SentPlan, pool: PagePool, host: HostPool) -> None:
    """Evicts the pages that a void plan fills or swaps out, because the worker may not have carried it out."""
    for page, page_hash in record.cached:
        if pool.hash_of(page) == page_hash:
            pool.evict(page)
    for page_hash in record.swapped_out:
        host.evict(page_hash)
