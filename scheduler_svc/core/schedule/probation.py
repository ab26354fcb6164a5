"""Makes the first plan for a new worker, whose step must be confirmed before the worker gets requests.

A worker with wrong sizes or a broken device must not change the limits of the service. A new lane is therefore on
probation: the ordinary planner plans one token of a sequence that belongs to no caller, and the result is checked like
any other. When the step is confirmed, the lane gets requests, and callers may rely on its sizes.
"""

import numpy as np

from scheduler_svc.core.messages.config import Policy
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.placement import Placement
from scheduler_svc.core.schedule.planner import plan_step
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Move, Request


def probation_plan(lane: Lane, *, max_bytes: int, now: float) -> Plan:
    """Returns a plan of one row and one token. Its request is removed at once, while the plan stays in flight.

    The handle is negative, so it does not belong to a live request and the token is dropped when the result arrives.
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
        placement=Placement((lane,)),
        frontend_idx=lambda _: 0,
        counters=Counters(),
        policy=Policy(),
        max_bytes=max_bytes,
        now=now,
    )
    assert plan is not None, "an empty lane has room for one token"
    lane.unseat(request, Move.END)
    return plan
