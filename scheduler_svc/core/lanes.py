"""Opens, resets and closes the lanes of all workers.

`Lanes` owns the lanes and the generations. It handles every fault of a worker or a step (lost, failed, out of memory,
out of sync) in the same way: it resets the lane, its requests go back to the queue with all known tokens, and any lane
with room admits them. A worker is refused after 5 failed steps without a confirmed one; it may join again.
"""

from collections.abc import Sequence

from scheduler_svc.core.check_join import frame_refusal, model_refusal
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LANES, CoreConfig
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.crash_loop import CrashLoop
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request_queue import RequestQueue
from scheduler_svc.core.state.worker_infos import WorkerInfos
from scheduler_svc.core.update import step_reports

_MAX_FAILED_STEPS = 5
# After these causes the pages of confirmed steps stay cached; after others the content of all pages is unknown.
_KEEPING_CAUSES = (ResetCause.STEP_FAILED, ResetCause.OUT_OF_MEMORY)


class Lanes:
    """All lanes serve the same model with the same attention pattern."""

    def __init__(self, config: CoreConfig, queue: RequestQueue) -> None:
        self._config = config
        self._queue = queue
        self.by_worker: dict[str, Lane] = {}
        """Lanes by worker name, in the order in which the workers joined."""
        self.worker_infos = WorkerInfos(config.max_worker_wait_seconds)
        self.crash_loop = CrashLoop()
        self.last_loss: tuple[float, str] | None = None
        """Time and reason of the last loss of a worker."""
        self.counters = Counters()
        self._generation = config.first_generation
        self._next_number = 1

    def report(
        self,
        lane: Lane,
        now: float,
        plans: Sequence[SentPlan] = (),
        *,
        cause: ResetCause | None = None,
        output_tokens: int = 0,
        compute_us: int = 0,
    ) -> list[fx.Effect]:
        """Returns the report of one event of the lane, if the config asks for reports."""
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
            what = "it joined again and is refused" if refusal else "it joined again"
            effects += self.close(worker, what, now, is_death=False)
        if refusal:
            return [*effects, *_refused_for_good(worker, refusal)]
        if len(self.by_worker) == MAX_LANES:
            reason = f"{MAX_LANES} workers serve already; this one is accepted when one of them leaves"
            return [*effects, fx.WorkerRefused(worker=worker, reason=reason, retry=True)]
        self._generation += 1
        lane = Lane(worker=worker, number=self._next_number, info=info, generation=self._generation, now=now)
        self._next_number += 1
        self.by_worker[worker] = lane
        effects.append(fx.WorkerAccepted(worker=worker, generation=self._generation))
        effects += self.report(lane, now)
        if not self._config.prove_workers:
            effects += self._prove(lane)
        return effects

    def _prove(self, lane: Lane) -> list[fx.Effect]:
        """Lets the lane get requests, and announces its sizes to callers."""
        lane.prove()
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
        """Resets and removes the lane. If `is_death`, the loss may count towards a crash loop."""
        lane = self.by_worker.pop(worker)
        effects = self._reset(lane, f"worker {worker} lost: {reason}", now, cause, compute_us)
        self.last_loss = now, reason
        # The death of a worker on probation does not count while another worker serves.
        if is_death and (lane.is_proven or not self._proven_infos()):
            self.crash_loop.died(reason, now)
        if lane.is_proven:
            self.worker_infos.worker_left(lane.info, now)
            self.worker_infos.update(self._proven_infos())
        if not self.worker_infos.present:
            self._queue.restore_set_aside()
        return effects

    def end_probation(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Proves the lane after its first step if its model still matches: other workers may be proven by now."""
        difference = self._model_refusal(lane.info, lane.worker)
        if not difference:
            return self._prove(lane)
        effects = self.close(lane.worker, difference, now, is_death=False)
        return [*effects, *_refused_for_good(lane.worker, difference)]

    def next_timeout(self) -> float | None:
        """Returns the time at which the first worker times out, None if there is no worker."""
        return min(map(self._timeout_of, self.by_worker.values()), default=None)

    def _timeout_of(self, lane: Lane) -> float:
        config = self._config
        if lane.in_flight:
            return lane.working_since() + config.step_timeout_seconds
        return lane.heard_at + config.silence_timeout_seconds

    def expire_workers(self, now: float) -> list[fx.Effect]:
        """Closes the lanes of workers that timed out, and asks the workers to join again."""
        effects: list[fx.Effect] = []
        for lane in [lane for lane in self.by_worker.values() if now >= self._timeout_of(lane)]:
            what = "a step took too long" if lane.in_flight else "it has been silent for too long"
            effects += self.close(lane.worker, what, now, ResetCause.WORKER_SILENT)
            effects.append(fx.AskRejoin(worker=lane.worker))
        return effects

    def _reset(self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int) -> list[fx.Effect]:
        """Resets the lane: its requests go back to the queue with all known tokens, its plans in flight become void."""
        void = tuple(lane.in_flight)
        self._generation += 1
        self.counters.lane_reset()
        # A preempted request no longer waits for the results of its plans in flight.
        for handle in {handle for record in void for handle in record.handles.tolist()}:
            request = self._queue.by_handle(handle)
            if request is not None and not request.row:
                request.void_pending_plans()
        requests = lane.reset(self._generation, keep_pages=cause in _KEEPING_CAUSES)
        for request in requests:
            request.void_pending_plans()
            self._queue.enqueue(request)
        effects: list[fx.Effect] = [fx.Note(message=f"{reason}; {len(requests)} requests go back to the queue")]
        return effects + self.report(lane, now, void, cause=cause, compute_us=compute_us)

    def reset_or_refuse(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """Handles a failed step: resets the lane, or refuses the worker after too many failed steps in a row."""
        num_failed = lane.count_failed_step()
        if num_failed < _MAX_FAILED_STEPS:
            return self._reset(lane, f"worker {lane.worker}: {reason}", now, cause, compute_us)
        reason = f"{num_failed} failed steps in a row without a confirmed one; the last: {reason}"
        return self.refuse_for_now(lane, reason, now, cause, compute_us)

    def refuse_for_now(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """Closes the lane and refuses the worker, which may join again."""
        refused = fx.WorkerRefused(worker=lane.worker, reason=reason, retry=True)
        return [*self.close(lane.worker, reason, now, cause, compute_us), refused]

    def flush(self) -> int:
        """Evicts all cached pages and returns their number."""
        for lane in self.by_worker.values():
            lane.schedule.clear_lookups()
        return sum(lane.pool.evict_all() + lane.host.evict_all() for lane in self.by_worker.values())


def _refused_for_good(worker: str, reason: str) -> list[fx.Effect]:
    note = fx.Note(message=f"worker {worker} refused: {reason}")
    return [note, fx.WorkerRefused(worker=worker, reason=reason, retry=False)]
