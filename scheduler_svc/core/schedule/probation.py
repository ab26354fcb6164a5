"""The first step of a new worker, which it has to confirm before it gets requests.

Owns no state. Any process that can open the socket can send a Join, with sizes that no device has. A new lane is
therefore on probation: its first plan computes one token of a sequence that belongs to no caller, through the ordinary
planner, and its result is checked like any other. Once it is confirmed, the lane takes requests and its sizes count.
"""

import numpy as np

from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.schedule.planner import plan_step
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.request_queue import RequestQueue


def probation_plan(lane: Lane, *, max_bytes: int, now: float) -> Plan:
    """A plan of one row and one token. The row and its page are free again at once, as after a cancelled request.

    The handle is negative and so belongs to no live request; the token is dropped when the result arrives.
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
    queue = RequestQueue()
    queue.add(request)
    plan = plan_step(
        lane=lane,
        queue=queue,
        suspects=(),
        other_lanes=(),
        frontend_idx=lambda _: 0,
        counters=Counters(),
        policy=Policy(),
        max_bytes=max_bytes,
        now=now,
    )
    assert plan is not None, "an empty lane has room for one token"
    lane.unseat(request, Move.END)
    return plan
