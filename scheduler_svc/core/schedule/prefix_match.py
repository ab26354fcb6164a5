"""Finds how much of a request's prefix a lane already has, and so the position at which computing starts.

A match ends at a page edge and before the last known token. The first computed position is therefore in a page that
only this request uses, and no cached page is written. If a sibling (another sample of the same request) has computed
their prompt, a sample shares the sibling's full pages and forks the last, partly filled page: it copies the page's
tokens. One position is then left to compute.

With a window, only the sink pages and the pages in the window of the first computed position must be cached.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.pages.host_pool import HostPage
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Phase, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """`pages` has one entry per full page before `first_position`: a page, a host page, or None outside the window.

    `fork` is a page and the number of tokens to copy from its start; `first_position` is then in the copy.
    """

    first_position: int
    pages: tuple[int | HostPage | None, ...] = ()
    fork: tuple[int, int] | None = None

    @property
    def shared(self) -> list[int]:
        """Pages on the device that the request will share."""
        return [page for page in self.pages if isinstance(page, int)]

    @property
    def num_loaded(self) -> int:
        """Number of host pages. Each is swapped in to a page that must be allocated."""
        return sum(isinstance(page, HostPage) for page in self.pages)


NO_MATCH = PrefixMatch(first_position=0)


def match_prefix(
    lane: Lane, request: Request, siblings: Iterable[Request] = (), newly_seated: Collection[int] = ()
) -> PrefixMatch | None:
    """Returns the longest match, or None if a sibling is still computing their prompt and the request should wait.

    The plan that is being made starts the rows `newly_seated`, so their pages cannot be copied yet.
    """
    request.hash_known(lane.info.page_size)
    if not request.num_outputs:
        # Samples of one request may always share pages, even with `cache_read` off.
        forked = _forked(lane, request, siblings, newly_seated)
        if forked is not NO_MATCH:
            return forked
    return _cached(lane, request)


def _forked(
    lane: Lane, request: Request, siblings: Iterable[Request], newly_seated: Collection[int]
) -> PrefixMatch | None:
    """Returns the match with a sibling on this lane, NO_MATCH, or None if a sibling is computing the prompt."""
    if request.prompt_logprobs_from:
        return NO_MATCH
    page_size, rows, last = lane.info.page_size, lane.rows, request.prompt_tokens - 1
    (full, rest), seen = divmod(last, page_size), lane.first_seen_page(last)
    is_computing = False
    for sibling in siblings:
        if sibling.phase is not Phase.RUNNING or sibling.worker != lane.worker or sibling.weights.keeps_pages:
            continue
        row = sibling.row
        if rows.planned[row] < last:
            is_computing = True
        elif row not in newly_seated and rows.held_from[row] <= max(seen, lane.sink_pages):
            table = rows.pages[row]
            pages = _readable(lane, table[:full], last)
            return PrefixMatch(first_position=last, pages=pages, fork=(table[full], rest) if rest else None)
    return None if is_computing else NO_MATCH


def cached_limit(request: Request, page_size: int) -> int:
    """Returns how many of its pages a request with known hashes may take from a cache."""
    if not request.submit.cache_read:
        return 0
    limit = min((request.known - 1) // page_size, len(request.page_hashes))
    if request.prompt_logprobs_from:
        # The first wanted logprob comes from the logits of the position before it, which must be computed.
        limit = min(limit, (request.prompt_logprobs_from - 1) // page_size)
    return limit


def _cached(lane: Lane, request: Request) -> PrefixMatch:
    """Returns the match with the prefix cache and host memory."""
    page_size, limit = lane.info.page_size, cached_limit(request, lane.info.page_size)
    if lane.info.window:
        return _cached_in_window(lane, request, limit)
    pages: list[int | HostPage | None] = []
    for page_idx in range(limit):
        page = find(lane, request, page_idx)
        if page is None:
            break
        pages.append(page)
    return PrefixMatch(first_position=len(pages) * page_size, pages=tuple(pages)) if pages else NO_MATCH


def _cached_in_window(lane: Lane, request: Request, limit: int) -> PrefixMatch:
    """Returns the match up to the last page edge with all window and sink pages cached."""
    page_size = lane.info.page_size
    pages = [find(lane, request, page_idx) for page_idx in range(limit)]
    missing_sinks = [i for i in range(min(lane.sink_pages, limit)) if pages[i] is None]
    if missing_sinks:
        limit = missing_sinks[0]
    num_consecutive, best = 0, 0  # cached pages right before `end`; the last usable page edge
    for end in range(1, limit + 1):
        num_consecutive = num_consecutive + 1 if pages[end - 1] is not None else 0
        seen = max(lane.first_seen_page(end * page_size), min(lane.sink_pages, end))
        if num_consecutive >= end - seen:
            best = end
    if not best:
        return NO_MATCH
    first = best * page_size
    return PrefixMatch(first_position=first, pages=_readable(lane, pages[:best], first))


def _readable(lane: Lane, pages: Sequence[int | HostPage | None], position: int) -> tuple[int | HostPage | None, ...]:
    """Returns the pages, with None for those that no position from `position` on reads."""
    seen = lane.first_seen_page(position)
    return tuple(page if i < lane.sink_pages or i >= seen else None for i, page in enumerate(pages))


def find(lane: Lane, request: Request, page_idx: int) -> int | HostPage | None:
    """Returns the page or host page with the request's tokens of this page index, None if they are not cached."""
    page_hash = request.page_hashes[page_idx]
    if not lane.pool.page_with_hash(page_hash) and not lane.host.num_used:
        return None  # the common case, without the cost of fetching the tokens
    tokens = request.page_tokens(page_idx, lane.info.page_size)
    return lane.pool.find(page_hash, tokens) or lane.host.find(page_hash, tokens)
