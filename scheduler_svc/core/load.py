"""Makes the report of the core's load, summed over its lanes."""

from collections.abc import Container

from scheduler_svc.core.availability import state_of
from scheduler_svc.core.limits.memory_limit import Reduction
from scheduler_svc.core.messages.reports import Incidents, Load, WorkerLoad
from scheduler_svc.core.messages.waits import WorkerState
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.workers.lanes import Lanes


def load_of(lanes: Lanes, queue: RequestQueue, step_ms: float, output_tokens: int, suspects: int, now: float) -> Load:
    """Returns the load at `now`. `output_tokens` is the number of tokens emitted since the start."""
    lost_at, lost_reason = lanes.last_loss or (None, "")
    counters, seated = lanes.counters, lanes.seated
    leaving = lanes.leaving
    each = [_of_lane(lane, leaving) for lane in seated]
    on_standby = [_of_lane(lane, leaving) for lane in lanes.by_worker.values() if not lane.is_seated]
    return Load(
        running=sum(one.running for one in each),
        waiting=queue.num_waiting,
        waiting_tokens=queue.waiting_tokens,
        pages_used=sum(one.pages_used for one in each),
        pages_total=sum(one.pages_total for one in each),
        workers=sum(one.state is WorkerState.SERVING for one in each),
        steps=counters.steps,
        step_ms=step_ms,
        preemptions=counters.preemptions,
        lane_resets=counters.resets,
        output_tokens=output_tokens,
        worker_pid=each[0].pid if each else 0,
        pages_cached=sum(one.pages_cached for one in each),
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        host_pages_used=sum(lane.host.num_used for lane in seated),
        host_pages_total=sum(lane.host.num_slots for lane in seated),
        per_worker=(*each, *on_standby),
        worker_lost_seconds=None if lost_at is None else now - lost_at,
        worker_lost_reason=lost_reason,
        suspects=suspects,
        standby_workers=sum(one.state is WorkerState.STANDBY for one in on_standby),
        incidents=_incidents(counters),
        held_pools=lanes.held_pools.load(now),
    )


def _incidents(counters: Counters) -> Incidents:
    reductions = counters.memory_reductions
    return Incidents(
        hung_workers=counters.hung_workers,
        smaller_steps=reductions[Reduction.SMALLER_STEP],
        fewer_rows=reductions[Reduction.FEWER_ROWS],
        alone=reductions[Reduction.ALONE],
        ended_for_memory=reductions[Reduction.ENDED],
        workers_refused_for_memory=reductions[Reduction.REFUSED],
    )


def _of_lane(lane: Lane, leaving: Container[str]) -> WorkerLoad:
    state, detail = state_of(lane, leaving)
    return WorkerLoad(
        pid=lane.info.pid,
        device=lane.info.device,
        running=lane.rows.num_seated,
        pages_used=lane.pool.num_used,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        is_standby=not lane.is_seated,
        name=lane.worker,
        is_draining=lane.worker in leaving,
        weights_version=lane.info.weights_version,
        state=state,
        detail=detail if lane.weights.refusal else "",
    )
