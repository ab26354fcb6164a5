"""The lanes of all workers: joining, planning, reading results, and the one recovery.

Owns the lanes, the generations and the suspects. It ends no request; it returns the requests that a step ends.

Every fault of a worker or a step (lost, failed, out of memory, out of sync) has the same recovery: the lane is reset,
its requests go back to the queue with all known tokens, and any lane with room takes them over. Requests whose step
failed are suspects: one suspect at a time runs, while the other rows of its lane pause, until it has sampled a token. A
request whose step fails while it runs alone is ended. A worker that never succeeds is refused for a while.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from scheduler_svc.core.check_join import frame_refusal, model_refusal, plan_bytes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LANES, CoreConfig
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.schedule.placement import by_backlog
from scheduler_svc.core.schedule.planner import plan_step
from scheduler_svc.core.schedule.probation import probation_plan
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.crash_loop import CrashLoop
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request_queue import RequestQueue
from scheduler_svc.core.state.worker_infos import WorkerInfos
from scheduler_svc.core.update import step_reports
from scheduler_svc.core.update.check_result import is_valid
from scheduler_svc.core.update.results import Ending, StepTokens, read_result

_RECENT_STEPS = 64
_MAX_FRUITLESS_RESETS = 5
_CAUSES = {
    ev.StepStatus.SKIPPED: ResetCause.SKIPPED,
    ev.StepStatus.FAILED: ResetCause.STEP_FAILED,
    ev.StepStatus.OUT_OF_MEMORY: ResetCause.OUT_OF_MEMORY,
    ev.StepStatus.OUT_OF_SYNC: ResetCause.OUT_OF_SYNC,
}
# After these causes the pages of confirmed steps are still valid; after others the content of all pages is unknown.
_KEEPING_CAUSES = (ResetCause.STEP_FAILED, ResetCause.OUT_OF_MEMORY)


class Lanes:
    """All lanes serve the same model with the same attention pattern."""

    def __init__(self, config: CoreConfig, queue: RequestQueue) -> None:
        self._config = config
        self._queue = queue
        self.by_worker: dict[str, Lane] = {}
        """Lanes by the worker's name, the longest joined first."""
        self.worker_infos = WorkerInfos(config.max_worker_wait_seconds)
        self.crash_loop = CrashLoop()
        self.last_loss: tuple[float, str] | None = None
        """Time and reason of the last loss of a worker."""
        self.suspects: set[int] = set()
        """Handles of live requests whose last step failed."""
        self.counters = Counters()
        self._generation = 0
        self._next_number = 1
        self._eos = np.zeros(0, np.int32)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    @property
    def step_ms(self) -> float:
        """Median duration of the last steps from plan sent to result read, in ms; 0 before the first."""
        return 1e3 * median(self._step_seconds) if self._step_seconds else 0.0

    def _report(
        self,
        lane: Lane,
        now: float,
        plans: Sequence[SentPlan] = (),
        *,
        cause: ResetCause | None = None,
        output_tokens: int = 0,
        compute_us: int = 0,
    ) -> list[fx.Effect]:
        """The report of one event of the lane, if the config asks for reports."""
        if not self._config.report_steps:
            return []
        totals = step_reports.Totals(self.counters.steps, self.counters.preemptions, self._queue.num_waiting)
        return [
            step_reports.step_report(
                totals, self.by_worker.values(), lane, now, plans, cause, output_tokens, compute_us
            )
        ]

    # Workers -------------------------------------------------------------------------------------------------

    def join(self, event: ev.WorkerJoined, now: float) -> list[fx.Effect]:
        """Opens a lane for the worker, or refuses it with a reason."""
        info, worker = event.info, event.worker
        effects: list[fx.Effect] = []
        refusal = frame_refusal(self._config, info) or self._model_refusal(info, worker)
        if worker in self.by_worker:
            what = "it came back as another" if refusal else "it joined again"
            effects += self.close(worker, what, now, is_death=False)
        if refusal:
            return [*effects, *_refused_for_good(worker, refusal)]
        if len(self.by_worker) == MAX_LANES:
            reason = f"{MAX_LANES} workers serve already; this one may stand by"
            return [*effects, fx.WorkerRefused(worker=worker, reason=reason, retry=True)]
        self._generation += 1
        lane = Lane(worker=worker, number=self._next_number, info=info, generation=self._generation, now=now)
        self._next_number += 1
        self.by_worker[worker] = lane
        effects.append(fx.WorkerAccepted(worker=worker, generation=self._generation))
        effects += self._report(lane, now)
        if not self._config.prove_workers:
            effects += self._prove(lane)
        return effects

    def _prove(self, lane: Lane) -> list[fx.Effect]:
        """The lane takes requests from now on, and callers may rely on its sizes."""
        lane.prove()
        self._eos = np.array(lane.info.eos_token_ids, np.int32)
        self.worker_infos.update(self._proven_infos())
        self._queue.restore_set_aside()
        return [fx.WorkerProven(worker=lane.worker)]

    def _proven_infos(self) -> list[WorkerInfo]:
        return [lane.info for lane in self.by_worker.values() if lane.is_proven]

    def _model_refusal(self, info: WorkerInfo, worker: str) -> str:
        served = self.worker_infos.served
        others = [lane.info for name, lane in self.by_worker.items() if name != worker and lane.is_proven]
        return model_refusal(info, None if served is None else served.info, others)

    def close(
        self,
        worker: str,
        reason: str,
        now: float,
        cause: ResetCause = ResetCause.WORKER_LOST,
        compute_us: int = 0,
        *,
        is_death: bool = True,
    ) -> list[fx.Effect]:
        """The worker is gone: resets and removes its lane. `is_death` is False if the worker said that it leaves."""
        lane = self.by_worker.pop(worker)
        effects = self._reset(lane, f"worker {worker} lost: {reason}", now, cause, compute_us)
        self.last_loss = now, reason
        # The death of a worker that never served does not count while another one serves.
        if is_death and (lane.is_proven or not self._proven_infos()):
            self.crash_loop.died(reason, now)
        if lane.is_proven:
            self.worker_infos.left(lane.info, now)
            self.worker_infos.update(self._proven_infos())
        if not self.worker_infos.present:
            self._queue.restore_set_aside()
        return effects

    def next_timeout(self) -> float | None:
        """Time at which the first worker times out, None if no worker has joined."""
        return min(map(self._timeout_of, self.by_worker.values()), default=None)

    def _timeout_of(self, lane: Lane) -> float:
        config = self._config
        if lane.in_flight:
            return lane.working_since() + config.step_timeout_seconds
        return lane.heard_at + config.silence_timeout_seconds

    def expire_workers(self, now: float) -> list[fx.Effect]:
        """Closes the lanes of workers that timed out. A worker that still lives may join again."""
        effects: list[fx.Effect] = []
        for worker, lane in list(self.by_worker.items()):
            if now >= self._timeout_of(lane):
                what = "a step took too long" if lane.in_flight else "it has been silent for too long"
                effects += self.close(worker, what, now, ResetCause.WORKER_SILENT)
                effects.append(fx.AskRejoin(worker=worker))
        return effects

    def _reset(self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int) -> list[fx.Effect]:
        """The one recovery: requests keep all known tokens, plans in flight are void, and no message is sent again."""
        void = tuple(lane.in_flight)
        self._generation += 1
        self.counters.lane_reset()
        # A request that was preempted while plans named it no longer waits for their results.
        for handle in {handle for record in void for handle in record.handles.tolist()}:
            request = self._queue.by_handle(handle)
            if request is not None and not request.row:
                request.void_pending_plans()
        requests = lane.reset(self._generation, keep_pages=cause in _KEEPING_CAUSES)
        for request in requests:
            request.void_pending_plans()
            self._queue.enqueue(request)
        effects: list[fx.Effect] = [fx.Note(message=f"{reason}; {len(requests)} requests go back to the queue")]
        return effects + self._report(lane, now, void, cause=cause, compute_us=compute_us)

    def _reset_or_refuse(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """Handles a step that failed: resets the lane, or refuses the worker after too many resets in a row."""
        num_resets = lane.count_fruitless_reset()
        if num_resets < _MAX_FRUITLESS_RESETS:
            return self._reset(lane, reason, now, cause, compute_us)
        reason = f"{num_resets} resets in a row without one confirmed step, the last one: {reason}"
        return self._refuse_for_now(lane, reason, now, cause, compute_us)

    def _refuse_for_now(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """Closes the lane; the worker may join again later."""
        refused = fx.WorkerRefused(worker=lane.worker, reason=reason, retry=True)
        return [*self.close(lane.worker, reason, now, cause, compute_us), refused]

    def flush(self) -> int:
        """Evicts every cached page; returns their number."""
        for lane in self.by_worker.values():
            lane.schedule.clear_lookups()
        return sum(lane.pool.evict_all() + lane.host.evict_all() for lane in self.by_worker.values())

    # Steps ---------------------------------------------------------------------------------------------------

    def plan(self, frontends: Mapping[str, int], now: float) -> list[fx.Effect]:
        """Makes plans until each lane has `plans_in_flight` of them in flight, or nothing can run."""
        effects: list[fx.Effect] = []
        has_planned = True
        while has_planned:
            has_planned = False
            for lane in by_backlog(self.by_worker.values()):
                if len(lane.in_flight) >= self._config.plans_in_flight:
                    continue
                if not lane.is_proven:
                    if not lane.in_flight:
                        plan = probation_plan(lane, max_bytes=plan_bytes(self._config, lane.info), now=now)
                        effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
                    continue
                plan = plan_step(
                    lane=lane,
                    queue=self._queue,
                    suspects=self.suspects,
                    other_lanes=[other for other in self.by_worker.values() if other is not lane and other.is_proven],
                    frontend_idx=frontends.__getitem__,
                    counters=self.counters,
                    policy=self._config.policy,
                    max_bytes=plan_bytes(self._config, lane.info),
                    now=now,
                )
                if plan is not None:
                    effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
                    has_planned = True
        return effects

    def read(
        self, event: ev.StepDone, frontends: Mapping[str, int], now: float
    ) -> tuple[list[fx.Effect], StepTokens | None, list[Ending]]:
        """Reads a result. Returns effects, the step's tokens if it succeeded, and the requests that it ends."""
        lane = self.by_worker.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)], None, []
        lane.answered(now)
        if event.generation != lane.generation:
            return [], None, []  # void
        record = lane.in_flight[0] if lane.in_flight else None
        if record is None or event.step != record.step:
            expected = record.step if record else "none"
            what = f"a result for step {event.step} came, expected {expected}"
            cause = ResetCause.WRONG_STEP
            return self._reset_or_refuse(lane, what, now, cause, event.compute_us), None, []
        if event.status is not ev.StepStatus.OK:
            return self._failed(lane, event, {int(handle) for handle in record.handles}, now)
        if not is_valid(event, record, lane.info.vocab_size):
            what = f"its result for step {event.step} is malformed"
            return self._refuse_for_now(lane, what, now, ResetCause.MALFORMED, event.compute_us), None, []
        lane.result_confirmed()
        if not lane.is_proven:
            return self._end_probation(lane, now), None, []
        self.counters.step_confirmed()
        self._step_seconds.append(now - record.sent_at)
        delivery = read_result(
            lane=lane,
            queue=self._queue,
            record=record,
            event=event,
            eos=self._eos,
            frontend_idx=frontends,
            now=now,
        )
        for ending in delivery.endings:
            if ending.failure is not None:
                lane.evict_unverified(ending.request)
        if len(delivery.tokens):
            self.crash_loop.confirmed()
        if self.suspects:
            self.suspects.difference_update(int(handle) for handle in record.handles[record.sampled])
        num_tokens = len(delivery.tokens)
        reports = self._report(lane, now, (record,), output_tokens=num_tokens, compute_us=event.compute_us)
        return reports, delivery, delivery.endings

    def _end_probation(self, lane: Lane, now: float) -> list[fx.Effect]:
        """The lane's first step succeeded. The worker is compared again: another one may have been proven since."""
        difference = self._model_refusal(lane.info, lane.worker)
        if not difference:
            return self._prove(lane)
        effects = self.close(lane.worker, difference, now, is_death=False)
        return [*effects, *_refused_for_good(lane.worker, difference)]

    def _failed(
        self, lane: Lane, event: ev.StepDone, handles: set[int], now: float
    ) -> tuple[list[fx.Effect], StepTokens | None, list[Ending]]:
        culprits = handles & self.suspects if len(handles) == 1 else set[int]()
        what = f"step {event.step} {event.status}: {event.detail}"
        effects = self._reset_or_refuse(lane, what, now, _CAUSES[event.status], event.compute_us)
        if event.status in (ev.StepStatus.OUT_OF_SYNC, ev.StepStatus.SKIPPED):
            return effects, None, []
        for handle in culprits:
            culprit = self._queue.by_handle(handle)
            assert culprit is not None, "a suspect that is not live"
            lane.excuse_resets()
            message = f"request {culprit.request_id}: its step {event.status}, alone too: {event.detail}"
            return effects, None, [Ending.broken(culprit, message)]
        self.suspects.update(handle for handle in handles if self._queue.by_handle(handle) is not None)
        return effects, None, []


def _refused_for_good(worker: str, reason: str) -> list[fx.Effect]:
    note = fx.Note(message=f"worker {worker} refused: {reason}")
    return [note, fx.WorkerRefused(worker=worker, reason=reason, retry=False)]
