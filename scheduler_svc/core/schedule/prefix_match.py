"""How a request may matched on a lane: which of its pages are kept there already, and where computing starts.

Pure looks at a lane; owns nothing. A hit ends where a page ends and before the last known token, so that the first
position computed starts in a page of the request's own: an indexed page is never written again. A sample whose sibling
has computed their prompt shares the sibling's pages, and forks the last of them by a copy of what stands in it, so that
one position is left to compute.

With a window only what the first computed position sees must be kept: the sink pages and those of the window.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.state.host_pool import HostPage
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Phase, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """`pages`, one per full page before `first_position`: a page of the lane, a host page, or None behind a window.

    `fork` is a page and the tokens to copy from its start; then `first_position` lies in the copy.
    """

    first_position: int
    pages: tuple[int | HostPage | None, ...] = ()
    fork: tuple[int, int] | None = None

    @property
    def shared(self) -> list[int]:
        """Pages of the lane."""
        return [page for page in self.pages if isinstance(page, int)]

    @property
    def num_loaded(self) -> int:
        """Pages that come from host memory, each into a page of the lane."""
        return sum(isinstance(page, HostPage) for page in self.pages)


NO_MATCH = PrefixMatch(first_position=0)


def match_prefix(
    lane: Lane, request: Request, siblings: Iterable[Request] = (), newly_seated: Collection[int] = ()
) -> PrefixMatch | None:
    """The longest there is; None: a sibling is computing their prompt, and will have it after the next plan.

    `newly_seated` rows are started by the plan that is being made: nothing can be copied from their pages yet.
    """
    request.hash_known(lane.info.page_size)
    if not request.num_outputs:
        # Its own prompt, so it may be shared whatever the request says of others'.
        forked = _forked(lane, request, siblings, newly_seated)
        if forked is not NO_MATCH:
            return forked
    return _kept(lane, request) if request.cache_read else NO_MATCH


def _forked(
    lane: Lane, request: Request, siblings: Iterable[Request], newly_seated: Collection[int]
) -> PrefixMatch | None:
    """As `beginning`, from a sibling on this lane; NO_MATCH: none can serve."""
    if request.prompt_logprobs_from:
        return NO_MATCH
    page_size, rows, last = lane.info.page_size, lane.rows, request.prompt_tokens - 1
    (full, rest), seen = divmod(last, page_size), lane.first_seen_page(last)
    under_way = False
    for sibling in siblings:
        if sibling.phase is not Phase.RUNNING or sibling.worker != lane.worker:
            continue
        row = sibling.row
        if rows.planned[row] < last:
            under_way = True
        elif row not in newly_seated and rows.held_from[row] <= max(seen, lane.sink_pages):
            table = rows.pages[row]
            pages = _that_are_seen(lane, table[:full], last)
            return PrefixMatch(first_position=last, pages=pages, fork=(table[full], rest) if rest else None)
    return None if under_way else NO_MATCH


def _kept(lane: Lane, request: Request) -> PrefixMatch:
    """What the index and the host memory have of it."""
    page_size = lane.info.page_size
    limit = min((request.known - 1) // page_size, len(request.page_hashes))
    if request.prompt_logprobs_from:
        # The first logprob wanted comes of the logits before it, which must be computed.
        limit = min(limit, (request.prompt_logprobs_from - 1) // page_size)
    if lane.info.window:
        return _kept_in_window(lane, request, limit)
    pages: list[int | HostPage | None] = []
    for page_idx in range(limit):
        page = find(lane, request, page_idx)
        if page is None:
            break
        pages.append(page)
    return PrefixMatch(first_position=len(pages) * page_size, pages=tuple(pages)) if pages else NO_MATCH


def _kept_in_window(lane: Lane, request: Request, limit: int) -> PrefixMatch:
    """The furthest page end whose window, and whose sink pages, are all there."""
    page_size = lane.info.page_size
    found = [find(lane, request, page_idx) for page_idx in range(limit)]
    missing_sinks = [i for i in range(min(lane.sink_pages, limit)) if found[i] is None]
    if missing_sinks:
        limit = missing_sinks[0]
    # run: how many pages in a row are there before each page end.
    run, best = 0, 0
    for end in range(1, limit + 1):
        run = run + 1 if found[end - 1] is not None else 0
        seen = max(lane.first_seen_page(end * page_size), min(lane.sink_pages, end))
        if run >= end - seen:
            best = end
    if not best:
        return NO_MATCH
    first = best * page_size
    return PrefixMatch(first_position=first, pages=_that_are_seen(lane, found[:best], first))


def _that_are_seen(
    lane: Lane, pages: Sequence[int | HostPage | None], position: int
) -> tuple[int | HostPage | None, ...]:
    """Without those that no position from this one on reads."""
    seen = lane.first_seen_page(position)
    return tuple(page if i < lane.sink_pages or i >= seen else None for i, page in enumerate(pages))


def find(lane: Lane, request: Request, page_idx: int) -> int | HostPage | None:
    """Where the lane keeps the request's page of this logical index."""
    page_hash = request.page_hashes[page_idx]
    if not lane.pool.page_with_hash(page_hash) and not lane.host.num_used:
        return None  # the common case, and tokens cost more to fetch
    tokens = request.page_tokens(page_idx, lane.info.page_size)
    return lane.pool.find(page_hash, tokens) or lane.host.find(page_hash, tokens)
