"""What becomes of a lane's requests and pages when its worker has loaded new weights.

No page that older weights computed is found afterwards: all pages leave the cache. With CONTINUE rows keep theirs; such
rows cache no page and share none with their siblings until they start again.
"""

from typing import Protocol

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.operators import Running, Weights
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.workers.lanes import Lanes


class End(Protocol):
    """Ends a live request."""

    def __call__(self, request: Request, now: float, *, reason: fx.EndReason | None = None) -> None: ...


def swapped(lane: Lane, lanes: Lanes, weights: Weights, end: End, now: float) -> list[fx.Effect]:
    """Applies the lane's new weights to the core's state. `end` ends a live request."""
    running = lane.weights.running
    lane.take_weights(weights)
    lane.schedule.clear_lookups()
    if lane.pages.pending is not None:
        lane.pages.drop_take_over()
    requests = lane.rows.requests_at(lane.rows.seated())
    if running is Running.CONTINUE and requests:
        for request in requests:
            request.weights.begin(weights.version, int(lane.rows.known[request.row]) - request.prompt_tokens)
            request.weights.keeps_pages = True
        lane.pages.evict_all()
        lane.pages.labels.forget()
        return [
            fx.Note(message=f"worker {lane.worker} has weights {weights.version!r}; {len(requests)} requests go on")
        ]
    if running is Running.ABORT:
        for request in requests:
            end(request, now, reason=fx.EndReason.ABORTED)
    what = f"worker {lane.worker} has weights {weights.version!r}"
    return lanes.reset(lane, what, now, ResetCause.NEW_WEIGHTS, 0, keep_pages=False)
