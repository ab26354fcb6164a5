"""What happens to the rows of one worker that is drained.

If a standby worker can take over the memory of its pages, the lane pauses until its plans in flight are answered, and
the worker ends; the standby worker then continues all rows from their pages. Otherwise rows are released a few at a
time, and other workers compute their tokens again while the remaining rows go on. A row that no other worker can hold,
or has room for, stays and runs.
"""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import Admission
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.queue.order import running_key
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.policy import headroom
from scheduler_svc.core.state.constrained import holds
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.workers import standby
from scheduler_svc.core.workers.held_pools import fits
from scheduler_svc.core.workers.lanes import Lanes, Leaving

LEAVE_SECONDS = 5.0
"""A worker that was told to end ends within this time, or its lane is closed."""
CAUSE = ResetCause.DRAINED


def is_last(lane: Lane, lanes: Lanes) -> bool:
    """Returns whether no worker would serve without this one."""
    others = any(other is not lane for other in lanes.serving)
    return lane.serves and not others and _heir(lanes) is None


def begin(lane: Lane, lanes: Lanes, now: float) -> None:
    """Lets no further request start on the lane. Callers see the sizes of the other workers from now on."""
    lanes.leaving[lane.worker] = Leaving()
    if lane.serves:
        lanes.worker_infos.worker_left(lane.info, now)
        lanes.serving_changed()


def advance(
    lane: Lane, lanes: Lanes, queue: RequestQueue, moving: list[Request], admission: Admission, now: float
) -> tuple[list[fx.Effect], list[Request]]:
    """Moves rows of the lane if others have room, and dismisses the worker when it is empty.

    Returns effects and the requests that were moved; `moving` has those moved before that have no row yet.
    """
    leaving, effects, moved = lanes.leaving[lane.worker], list[fx.Effect](), list[Request]()
    heir = _heir(lanes) if lane.serves and not leaving.has_heir else None
    leaving.is_paused = heir is not None and _can_hand_over(lane, heir)
    if leaving.is_paused:
        if lane.in_flight:
            return [], []
    else:
        if heir is not None:
            leaving.has_heir = True
            effects += lanes.seat_next(now)
        moved = _move_rows(lane, lanes, queue, moving, admission)
        if lane.rows.num_seated or (lane.in_flight and lane.serves):
            return effects, moved
    leaving.is_dismissed = leaving.is_paused = True
    return [*effects, fx.DismissWorker(worker=lane.worker)], moved


def dismiss_at_once(lane: Lane, lanes: Lanes, now: float) -> list[fx.Effect]:
    """Closes the lane although requests run on it. They go back to the queue."""
    dismissed = fx.DismissWorker(worker=lane.worker)
    return [dismissed, *lanes.close(lane.worker, "its drain took too long", now, CAUSE, is_death=False)]


def detail(lane: Lane, lanes: Lanes) -> str:
    """Returns in one sentence what the drain of this worker waits for."""
    leaving, rows = lanes.leaving[lane.worker], lane.rows.num_seated
    if leaving.is_dismissed:
        return "the worker was told to end"
    if leaving.is_paused:
        return f"{rows} requests go to a standby worker when the worker's present steps are done"
    longest = max((other.info.longest_sequence for other in lanes.serving), default=0)
    requests = lane.rows.requests_at(lane.rows.seated())
    bound = sum(request.total_length > longest for request in requests)
    if bound == rows:
        return f"{rows} requests end on this worker, because no other one can hold them"
    return f"{rows - bound} requests move when other workers have room; {bound} end here"


def tokens_left(lane: Lane) -> int:
    """Returns the largest number of tokens that the rows of the lane may still produce."""
    rows = lane.rows
    seated = rows.seated()
    return int((rows.last[seated] + 1 - rows.known[seated]).sum())


def _heir(lanes: Lanes) -> Lane | None:
    """Returns the standby worker that would be seated next."""
    return standby.first_proven(lanes.by_worker.values(), lanes.leaving)


def _can_hand_over(lane: Lane, heir: Lane) -> bool:
    """Returns whether the standby worker can continue from the pages of this one."""
    return bool(lane.pages.pool_id) and lane.pool.num_cached > 0 and fits(lane.info, heir.info)


def _move_rows(
    lane: Lane, lanes: Lanes, queue: RequestQueue, moving: list[Request], admission: Admission
) -> list[Request]:
    """Sends rows back to the queue that another lane has room for, those first that come first in the queue.

    Each lane gets about one step of tokens at a time, so that the rows wait here no longer than they must.
    """
    moved = [request for request in lane.rows.requests_at(lane.rows.seated()) if queue.is_held(request)]
    # Suspects run only in trials, which are on other lanes from now on.
    for request in moved:
        _release(lane, request, queue)
    targets = [other for other in lanes.serving if other.num_free_rows and not other.schedule.is_blocked]
    if not targets or not lane.rows.num_seated:
        return moved
    free = {other.number: other.num_free_rows - len(moving) for other in targets}
    budget = {
        other.number: other.info.token_budget - _uncomputed(other) - sum(one.known for one in moving)
        for other in targets
    }
    pages = {
        other.number: other.pool.num_unused
        - headroom(admission, other.rows, other.info, other.schedule.expected_share)
        - sum(other.pages_for(one.known) + 1 for one in moving)
        for other in targets
    }
    for request in sorted(lane.rows.requests_at(lane.rows.seated()), key=running_key):
        known = int(lane.rows.known[request.row])
        for other in targets:
            number, needed = other.number, other.info.pages_at_once(known + 1) + 1
            if free[number] <= 0 or pages[number] < needed or not holds(other, request):
                continue
            if budget[number] < known and budget[number] < other.info.token_budget:
                continue
            free[number], pages[number] = free[number] - 1, pages[number] - needed
            budget[number] -= known
            _release(lane, request, queue)
            moved.append(request)
            break
    return moved


def _release(lane: Lane, request: Request, queue: RequestQueue) -> None:
    lane.unseat(request, Move.RESET)
    queue.enqueue(request)


def _uncomputed(lane: Lane) -> int:
    """Returns the tokens of prompts that the lane has not planned yet."""
    left = lane.rows.known - lane.rows.planned
    return int(left[lane.rows.seated()].clip(0).sum())
