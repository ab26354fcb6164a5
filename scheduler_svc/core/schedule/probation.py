"""The step that a new worker has to confirm before requests and callers depend on it.

Owns no state. Anything that can open the socket can send a Join, with sizes that no device has. So a lane starts on
probation: its first plan runs one token of a sequence that belongs to no caller, through the ordinary planner. The
result is checked like any other; from then on the lane takes requests and its sizes are served.
"""

import numpy as np

from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.schedule.plan_builder import Counters
from scheduler_svc.core.schedule.planner import plan_step
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.request_queue import RequestBook


def probation_plan(lane: Lane, *, max_bytes: int, now: float) -> Plan:
    """One row, one token; the row and its page are free again at once, as those of a request that was cancelled.

    The handle is negative, so it belongs to no live request and the token is dropped when it comes.
    """
    request = Request(
        handle=-lane.number,
        frontend="",
        stream=0,
        request_id="probation",
        prompt=np.zeros(1, np.int32),
        sampling=b"",
        sample_idx=0,
        total_length=2,
        min_new_tokens=0,
        stop_token_ids=frozenset(),
        banned=(),
        ignore_eos=True,
        priority=0,
        arrival=0,
        arrived_at=now,
    )
    book = RequestBook()
    book.add(request)
    plan = plan_step(
        lane=lane,
        book=book,
        suspects=(),
        rivals=(),
        frontend_idx=lambda _: 0,
        counters=Counters(),
        policy=Policy(),
        max_bytes=max_bytes,
        now=now,
    )
    assert plan is not None, "an empty lane has room for one token"
    lane.leave(request, Move.END)
    return plan
