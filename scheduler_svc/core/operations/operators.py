"""What operators ask of the core as it is: its load, flushes of its cache, its quarantine."""

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import FlushCache, LoadQuery
from scheduler_svc.core.messages.operators import ClearQuarantine, QuarantineQuery, QuarantineReply, QuarantineRestored
from scheduler_svc.core.messages.reports import Incidents, Load, WorkerLoad, WorkerState
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.memory_limit import Reduction
from scheduler_svc.core.status import state_of


class Operators(Organ):
    @handles(LoadQuery)
    def _load(self, event: LoadQuery, now: float) -> list[fx.Effect]:
        version = "" if self._core.weights is None else self._core.weights.version
        load = load_of(self._lanes, self._queue, version, now)
        return [fx.LoadReply(frontend=event.frontend, query=event.query, load=load)]

    @handles(FlushCache)
    def _flush(self, event: FlushCache, now: float) -> list[fx.Effect]:
        """Evicts all cached pages, also those of lost workers."""
        count = self._core.held_pools.evict_all()
        for lane in self._lanes.values():
            lane.schedule.lookups.clear()
            lane.pages.labels.forget()
            count += lane.pool.evict_all() + lane.host.evict_all()
        return [fx.FlushReply(frontend=event.frontend, query=event.query, pages=count)]

    @handles(QuarantineRestored)
    def _quarantine_restored(self, event: QuarantineRestored, now: float) -> list[fx.Effect]:
        """Continues the quarantine of an earlier process."""
        for entry in event.entries:
            self._core.quarantine.restore(entry, now)
        return []

    @handles(QuarantineQuery, ClearQuarantine)
    def _quarantine(self, event: QuarantineQuery | ClearQuarantine, now: float) -> list[fx.Effect]:
        """Lists the entries; for a ClearQuarantine those that are left."""
        quarantine = self._core.quarantine
        removed = quarantine.clear(event.keys, now) if isinstance(event, ClearQuarantine) else 0
        entries = quarantine.report(now)
        return [QuarantineReply(frontend=event.frontend, query=event.query, entries=entries, removed=removed)]


def load_of(lanes: Lanes, queue: RequestQueue, weights_version: str, now: float) -> Load:
    lost_at, lost_reason = lanes.last_loss or (None, "")
    counters, seated = lanes.counters, lanes.seated
    reductions = counters.memory_reductions
    loads = [_of_lane(lane) for lane in seated]
    on_standby = [_of_lane(lane) for lane in lanes.values() if not lane.phases.counts]
    return Load(
        running=sum(one.running for one in loads),
        waiting=queue.num_waiting,
        waiting_tokens=queue.waiting_tokens,
        pages_used=sum(one.pages_used for one in loads),
        pages_total=sum(one.pages_total for one in loads),
        workers=sum(one.state is WorkerState.SERVING for one in loads),
        steps=counters.steps,
        step_ms=counters.step_ms,
        preemptions=counters.preemptions,
        lane_resets=counters.resets,
        output_tokens=counters.output_tokens,
        worker_pid=loads[0].pid if loads else 0,
        pages_cached=sum(one.pages_cached for one in loads),
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        host_pages_used=sum(lane.host.num_used for lane in seated),
        host_pages_total=sum(lane.host.num_slots for lane in seated),
        per_worker=(*loads, *on_standby),
        worker_lost_seconds=None if lost_at is None else now - lost_at,
        worker_lost_reason=lost_reason,
        suspects=len(lanes.suspects),
        standby_workers=sum(one.state is WorkerState.STANDBY for one in on_standby),
        incidents=Incidents(
            hung_workers=counters.hung_workers,
            smaller_steps=reductions[Reduction.SMALLER_STEP],
            fewer_rows=reductions[Reduction.FEWER_ROWS],
            alone=reductions[Reduction.ALONE],
            ended_for_memory=reductions[Reduction.ENDED],
            workers_refused_for_memory=reductions[Reduction.REFUSED],
        ),
        held_pools=lanes.held_pools.load(now),
        weights_version=weights_version,
    )


def _of_lane(lane: Lane) -> WorkerLoad:
    state, detail = state_of(lane)
    return WorkerLoad(
        pid=lane.info.pid,
        device=lane.info.device,
        running=lane.rows.num_seated,
        pages_used=lane.pool.num_used,
        pages_cached=lane.pool.num_evictable,
        pages_total=lane.info.usable_pages,
        is_standby=not lane.phases.counts,
        name=lane.worker,
        is_draining=not lane.phases.stays,
        weights_version=lane.info.weights_version,
        state=state,
        detail=detail if lane.weights.refusal else "",
    )
