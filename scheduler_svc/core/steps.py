"""Makes the plans of all lanes and reads the results of their steps.

If a step fails, its requests become suspects (`suspicion/suspects.py`), as they do if a worker dies.
"""

from dataclasses import replace

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.lanes import plan_bytes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.plan import Plan, SentPlan
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.recovery.workers import ran_out_of_memory
from scheduler_svc.core.schedule import trials
from scheduler_svc.core.schedule.placement import Placement, backlog
from scheduler_svc.core.schedule.plan_builder import PlanBuilder
from scheduler_svc.core.schedule.planner import plan_step, probation_plan
from scheduler_svc.core.schedule.results import is_valid, read_result
from scheduler_svc.core.state.lane import Lane, evict_unverified, want

_CAUSES = {
    ev.StepStatus.SKIPPED: ResetCause.SKIPPED,
    ev.StepStatus.FAILED: ResetCause.STEP_FAILED,
    ev.StepStatus.OUT_OF_MEMORY: ResetCause.OUT_OF_MEMORY,
    ev.StepStatus.OUT_OF_SYNC: ResetCause.OUT_OF_SYNC,
}


class Steps(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Makes plans until each lane has `plans_in_flight` plans in flight or nothing can run."""
        effects: list[fx.Effect] = []
        suspects, serving = self._lanes.suspects, self._lanes.serving
        proven = [lane for lane in serving if lane.phases.may_start]
        trial_on, turn = trials.choose(suspects, serving, proven, now)
        placement = Placement(proven, self._lanes.page_index, now=now)
        # Rounds without a plan, in which a lane may leave a request to one that has already looked at it.
        num_idle = 0
        while num_idle <= len(proven):
            has_planned, looked = False, set[int]()
            for lane in self._free_lanes(trial_on):
                if lane.phases.on_probation:
                    plan = probation_plan(lane, max_bytes=plan_bytes(self._config, lane.info), now=now)
                    effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
                    continue
                if lane is trial_on:
                    plan = self._plan_trial(lane, placement, now)
                else:
                    plan = self._plan(lane, placement, turn, now)
                placement.end(lane)
                if self._core.sources.is_used:
                    effects += self._core.sources.orders(lane, now)
                looked.add(lane.number)
                if plan is not None:
                    effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
                    has_planned = True
            num_idle += not has_planned
            if not has_planned and not placement.was_left_to(looked):
                break
        return effects

    def _free_lanes(self, trial_on: Lane | None) -> list[Lane]:
        """Returns the lanes that may make a plan, shortest backlog first."""
        free: list[Lane] = []
        for lane in self._lanes.values():
            most = 1 if lane is trial_on or lane.phases.on_probation else self._config.plans_in_flight
            if lane.phases.may_plan and len(lane.in_flight) < most:
                free.append(lane)
        if len(free) > 1:
            free.sort(key=lambda lane: (backlog(lane), lane.number))
        return free

    def _plan(self, lane: Lane, placement: Placement, turn: trials.Turn, now: float) -> Plan | None:
        if not lane.phases.may_start:
            turn = replace(turn, admits=False)
        builder = PlanBuilder(
            lane=lane,
            queue=self._queue,
            placement=placement,
            frontends=self._frontends,
            counters=self._lanes.counters,
            policy=self._config.policy,
            now=now,
            bytes_left=plan_bytes(self._config, lane.info),
            turn=turn,
        )
        return plan_step(builder)

    def _plan_trial(self, lane: Lane, placement: Placement, now: float) -> Plan | None:
        """Makes the next plan of the lane of the current trial: the trial's, or one of other requests."""
        suspects = self._lanes.suspects
        others = [other for other in placement.lanes if other is not lane]
        for request in trials.trial_starts(suspects, lane):
            want(lane, request)
        if trials.is_apart(suspects, lane, [lane, *others]):
            trials.move_others(lane, self._queue, others, self._lanes.counters)
        for turn in trials.turns(suspects, lane, others):
            plan = self._plan(lane, placement, turn, now)
            if plan is not None:
                suspects.is_next = not turn.is_trial
                if turn.is_trial and suspects.lacks_control():
                    suspects.waive_control()
                return plan
        return None

    @handles(ev.StepDone)
    def read(self, event: ev.StepDone, now: float) -> list[fx.Effect]:
        """Reads a result: confirms the step, or resets the lane."""
        lane = self._lanes.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        lane.clock.answered(now, lane.in_flight)
        if event.generation != lane.generation:
            return []  # its plan is void
        record = lane.in_flight[0] if lane.in_flight else None
        if record is None or event.step != record.step:
            expected = f"step {record.step} is the oldest" if record else "no step is"
            what = f"the result is for step {event.step}, but {expected} in flight"
            cause = ResetCause.WRONG_STEP
            return self._lanes.reset_or_refuse(lane, what, now, cause, event.compute_us)
        if record.takes_over:
            self._lanes.held_pools.answered(lane, ok=event.pool_id == record.takes_over)
            lane.take_over_ended(record.takes_over, event.pool_id)
        self._lanes.held_pools.num_damaged += event.damaged_pages
        if event.status is not ev.StepStatus.OK:
            if event.status is ev.StepStatus.OUT_OF_MEMORY and lane.phases.serves:
                return ran_out_of_memory(self._core, lane, event, now)
            what = f"step {event.step} {event.status}: {event.detail}"
            return self._lanes.reset_or_refuse(lane, what, now, _CAUSES[event.status], event.compute_us)
        if not is_valid(event, record, lane.info.vocab_size):
            what = f"its result for step {event.step} is malformed"
            return self._lanes.refuse_for_now(lane, what, now, ResetCause.MALFORMED, event.compute_us)
        lane.result_confirmed()
        if lane.phases.on_probation:
            return self._lanes.end_probation(lane, now)
        return self._confirm(lane, record, event, now)

    def _confirm(self, lane: Lane, record: SentPlan, event: ev.StepDone, now: float) -> list[fx.Effect]:
        """Emits the tokens of a confirmed step, and ends the requests that end with it."""
        step_tokens = read_result(
            lane=lane,
            queue=self._queue,
            record=record,
            event=event,
            frontend_idx=self._frontends,
            now=now,
        )
        for ending in step_tokens.endings:
            if ending.failure is not None:
                evict_unverified(ending.request, lane.pool, lane.host)
        num_tokens = len(step_tokens.tokens)
        if num_tokens:
            self._lanes.crash_loop.confirmed()
        self._lanes.suspects.confirmed(lane, record)
        self._lanes.counters.step_confirmed(now - record.sent_at, num_tokens)
        effects = self._lanes.report(lane, now, (record,), output_tokens=num_tokens, compute_us=event.compute_us)
        for ending in step_tokens.endings:
            self._core.apply(ending, now)
        return effects + self._core.output.deliver(step_tokens, self._frontends, lane.info.weights_version)
