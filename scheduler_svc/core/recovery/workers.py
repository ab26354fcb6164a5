"""Workers that join and leave, those on standby, and what follows if one hangs, loses frames or runs out of memory.

**Hung workers.** A worker is given up if a step takes too long, or if it is silent between steps
(`state/step_clock.py`). Loading and compiling happen before a worker joins, so no deadline applies to them.

**Lost frames.** A connection delivers frames in order or ends. But it may end and be opened again so fast that neither
side is notified, and then neither knows that frames are missing. A worker's heartbeats say which plan it answered last;
without them the lane would wait until the deadline of the step.

**Out of memory.** `MemoryLimit` of the lane decides what follows: a smaller step, then fewer rows, then one request
alone, then its end. A step that runs out of memory makes no request a suspect and does not count as a failed step.
"""

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.schedule.endings import Ending
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.memory_limit import Reduction
from tandem_contract.plural import counted


class Workers(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Forgets the sizes and the page pools of workers that left too long ago."""
        self._lanes.worker_infos.expire(now)
        self._core.held_pools.expire(now)
        return []

    def next_wake(self) -> float | None:
        return self._lanes.worker_infos.next_expiry()

    @handles(ev.WorkerJoined)
    def _joined(self, event: ev.WorkerJoined, now: float) -> list[fx.Effect]:
        return self._lanes.join(event, now)

    @handles(ev.WorkerLost)
    def _lost(self, event: ev.WorkerLost, now: float) -> list[fx.Effect]:
        if event.worker not in self._lanes:
            return []
        is_orderly = event.is_orderly
        return self._lanes.close(event.worker, event.reason, now, is_death=not is_orderly, is_orderly=is_orderly)


class Standby(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        return self._lanes.seat_due(now)

    def next_wake(self) -> float | None:
        return self._lanes.next_seating()

    def audit(self) -> None:
        """Checks that callers see the sizes of the serving workers."""
        serving = [lane for lane in self._lanes.values() if lane.phases.serves and lane.phases.stays]
        info, sizes = self._core.info, [(lane.info.max_length, lane.info.usable_pages) for lane in serving]
        if sizes:
            assert info is not None, "a worker serves, and callers see no model"
            assert (info.max_length, info.usable_pages) == max(sizes), "callers see sizes that no worker has"


class Hung(Organ):
    def next_wake(self) -> float | None:
        """Returns when, on the core's clock, the first worker is given up, also one on standby; None without one."""
        first = None
        for lane in self._lanes.values():
            at = lane.timeout(self._config)
            if first is None or at < first:
                first = at
        return first

    def tick(self, now: float) -> list[fx.Effect]:
        """Closes the lanes of workers that hang. Each of them is killed, or joins again if it still runs."""
        first, lanes, config = self.next_wake(), self._lanes, self._config
        if first is None or now < first:
            return []
        effects = list[fx.Effect]()
        for lane in [lane for lane in lanes.values() if now >= lane.timeout(config)]:
            if lane.phases.is_loading:
                reason = f"it has not loaded weights {lane.weights.ordered.version!r} in time"
            else:
                reason = lane.clock.why_given_up(lane.in_flight, config, now)
            lanes.counters.hung_workers += 1
            effects += lanes.close(lane.worker, reason, now, ResetCause.WORKER_SILENT)
            effects += [fx.KillWorker(worker=lane.worker), fx.AskRejoin(worker=lane.worker)]
        return effects

    @handles(ev.Paused)
    def _paused(self, event: ev.Paused, now: float) -> list[fx.Effect]:
        """Excuses all workers for a time in which the scheduler did not run."""
        for lane in self._lanes.values():
            lane.clock.paused(event.seconds, is_working=bool(lane.in_flight))
            lane.weights.until += event.seconds
            lane.resources.paused(event.seconds)
        return []

    @handles(ev.WorkerAlive)
    def _heard(self, event: ev.WorkerAlive, now: float) -> list[fx.Effect]:
        """Handles a heartbeat: resets the lane if frames are missing. An unknown worker is asked to join."""
        lane = self._lanes.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        lane.clock.heard(now)
        if not (lost := _what_was_lost(lane, event, now)):
            return []
        return self._lanes.reset_or_refuse(lane, lost, now, ResetCause.OUT_OF_SYNC, 0)


# A plan may be this old and still on its way to the worker: ZeroMQ's heartbeats end a connection that stalls longer.
_PLAN_SECONDS = 2.0


def _what_was_lost(lane: Lane, event: ev.WorkerAlive, now: float) -> str:
    """Returns which frame is missing, or an empty string."""
    if not lane.in_flight or event.done is None:
        return ""
    oldest = lane.in_flight[0]
    generation, step = event.done
    if generation == lane.generation and step >= oldest.step:
        return f"the result of step {oldest.step} was lost: the worker has sent it, and its heartbeat came first"
    age = now - lane.clock.began_at(oldest)
    if not event.num_in_flight and age > _PLAN_SECONDS:
        return f"the plan of step {oldest.step} was lost: the worker does not have it after {age:.1f} s"
    return ""


def ran_out_of_memory(core: Core, lane: Lane, event: ev.StepDone, now: float) -> list[fx.Effect]:
    """Handles the result OUT_OF_MEMORY of the oldest plan in flight of a proven worker.

    Lowers the lane's limits and resets the lane. Ends a request that nothing smaller can help.
    """
    record, lanes = lane.in_flight[0], core.lanes
    reduction = lane.memory.ran_out(record)
    lanes.counters.memory_reductions[reduction] += 1
    positions, rows = record.prefill_tokens + record.decode_tokens, len(record.rows)
    size = f"{counted(positions, 'position')} of {counted(rows, 'row')}"
    what = f"step {record.step} with {size} ran out of memory ({event.detail}); {lane.memory.limits()}"
    if reduction is Reduction.REFUSED:
        what += "; two requests in a row ran out of memory alone"
        return lanes.refuse_for_now(lane, what, now, ResetCause.OUT_OF_MEMORY, event.compute_us)
    what, cause = f"worker {lane.worker}: {what}", ResetCause.OUT_OF_MEMORY
    # The pages of confirmed steps stay cached, and the step does not count as a failed one.
    effects = lanes.reset(lane, what, now, cause, event.compute_us, keep_pages=True)
    request = core.queue.by_handle(int(record.handles[0])) if reduction is Reduction.ENDED else None
    if request is None:
        return effects
    why = (
        f"request {request.submit.request_id}: its worker ran out of memory in two steps in which it ran alone; the "
        f"last had {size}, the sequence has {counted(request.known, 'token')} ({event.detail})"
    )
    core.apply(Ending.failed(request, why), now)
    return effects
