"""Opens, resets and closes the lanes of all workers.

`Lanes` owns the lanes and the generations. It handles every fault of a worker or a step (lost, hung, failed, out of
memory, out of sync) in the same way: it resets the lane, its requests go back to the queue with all known tokens, and
any lane with room admits them. A worker is refused after 5 failed steps without a confirmed one; it may join again.

What may happen on a lane is its phases (`state/lane_phase.py`). A standby worker's lane is proven and then waits; if a
serving worker is lost, the same event seats the standby lane that was proven first (`first_proven`).

**Crash loop.** The workers are in a crash loop if `DEATHS` of them died within `WINDOW_SECONDS` and no token was
confirmed in between. The service then rejects requests and reports itself as not serving, because no worker would serve
them. A confirmed token ends the crash loop. It also ends `WINDOW_SECONDS` after the first death that counts. Otherwise
it could last for ever, because a service that rejects requests computes no token.

Deaths in a trial (`suspicion/suspects.py`), where a request is looked for that kills workers, do not count. Innocent
requests get tokens between such deaths, so if `TRIAL_DEATHS` follow each other without one, the further ones count.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LANES, CoreConfig
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.reports import ResetCause, StepKind, StepReport
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.pages.page_index import PageIndex
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.recovery.held_pools import HeldPools, accept
from scheduler_svc.core.schedule.plan_builder import largest_plan_bytes
from scheduler_svc.core.state.counters import Counters
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.lane_phase import LaneMove, LanePhase
from scheduler_svc.core.state.request import Move, Request
from scheduler_svc.core.state.worker_infos import WorkerInfos
from scheduler_svc.core.suspicion.suspects import Suspects
from tandem_contract.plural import numbered

DEATHS = 5
WINDOW_SECONDS = 60.0
TRIAL_DEATHS = 5


class CrashLoop:
    """Remembers the times of the latest deaths since the last confirmed token."""

    def __init__(self) -> None:
        self._died_at: deque[float] = deque(maxlen=DEATHS)
        self._trial_deaths = 0
        self._reason = ""

    def died(self, reason: str, now: float, *, in_trial: bool = False) -> None:
        """Records that a worker which had joined is gone and did not announce its stop."""
        self._trial_deaths += in_trial
        if in_trial and self._trial_deaths <= TRIAL_DEATHS:
            return
        self._died_at.append(now)
        self._reason = reason

    def confirmed(self) -> None:
        """Records that the result of a step contained tokens, or that the request at fault was found."""
        self._trial_deaths = 0
        if self._died_at:
            self._died_at.clear()

    def cause(self, now: float) -> str:
        """Returns one sentence if the workers are in a crash loop, otherwise an empty string."""
        if len(self._died_at) < DEATHS or now - self._died_at[0] > WINDOW_SECONDS:
            return ""
        return (
            f"workers crash in a loop: {DEATHS} died within {WINDOW_SECONDS:g} s and no token was computed in between; "
            f"the last one: {self._reason}; "
            f"requests are accepted again after the next token, or {WINDOW_SECONDS:g} s after the first of these deaths"
        )


PATIENCE_SECONDS = 1.0
"""After the start of the core, standby workers wait this long for a worker without that flag.

Workers join a restarted scheduler in any order within half a second. Without this wait a standby worker that is first
would be seated, and then the worker that served before.
"""


def plan_bytes(config: CoreConfig, info: WorkerInfo) -> int:
    """Returns the largest encoded size of the rows that one plan starts. Half a frame is reserved for the rest."""
    return min(config.max_plan_bytes, info.max_frame_bytes // 2)


def frame_refusal(config: CoreConfig, info: WorkerInfo) -> str:
    """Returns why a plan could exceed the worker's frames, or an empty string if none can."""
    needed = largest_plan_bytes(info, plan_bytes(config, info))
    if needed <= info.max_frame_bytes:
        return ""
    return (
        f"max_length is {info.max_length} and num_pages {info.num_pages}: a plan may then take "
        f"{numbered(needed, 'byte')}, but the worker accepts frames of at most {info.max_frame_bytes}; "
        "choose a smaller max_length"
    )


def model_refusal(info: WorkerInfo, served: WorkerInfo | None, others: Iterable[WorkerInfo]) -> str:
    """Returns why the worker would answer requests differently from the others, or an empty string."""
    if served is None:
        return ""
    if info.identity != served.identity:
        what = "weights, config or tokenizer differ"
        if served.page_size != info.page_size:
            what = f"pages of {numbered(info.page_size, 'token')} instead of {served.page_size}"
        return (
            f"this service serves {served.model} (identity {served.identity[:12]}); the worker has "
            f"{info.model} (identity {info.identity[:12]}): {what}; start the worker with the same model, or restart "
            "the scheduler"
        )
    for other in others:
        if (info.window, info.sink_tokens) != (other.window, other.sink_tokens):
            return (
                f"the serving workers attend to {_pattern(other)}; this worker attends to {_pattern(info)}, so it "
                "would answer the same request differently; start it with the same window, or restart the scheduler"
            )
    return ""


def _pattern(info: WorkerInfo) -> str:
    if not info.window:
        return "all earlier tokens"
    return f"the last {info.window} and the first {numbered(info.sink_tokens, 'token')}"


def refused_for_good(worker: str, reason: str) -> list[fx.Effect]:
    """Returns the effects that refuse a worker which may not join again."""
    note = fx.Note(message=f"worker {worker} refused: {reason}")
    return [note, fx.WorkerRefused(worker=worker, reason=reason, retry=False)]


_MAX_FAILED_STEPS = 5
# After these causes the pages of confirmed steps stay cached; after others the content of all pages is unknown.
_KEEPING_CAUSES = (ResetCause.STEP_FAILED, ResetCause.OUT_OF_MEMORY)
# After these causes the requests in flight are suspects, and pages stay cached if their memory outlives the worker.
_DEATHS = (ResetCause.WORKER_LOST, ResetCause.WORKER_SILENT)


class Lanes(dict[str, Lane]):
    """All lanes by worker name, in the order in which the workers joined; those of standby workers too.

    They serve the same model with the same attention pattern. Only the methods here add and remove lanes.
    """

    def __init__(self, config: CoreConfig, queue: RequestQueue) -> None:
        super().__init__()
        self._config, self._queue = config, queue
        self.seated, self.serving = list[Lane](), list[Lane]()
        """The lanes of all workers but those on standby; those of them that are proven and not drained."""
        self.worker_infos = WorkerInfos(config.max_worker_wait_seconds)
        self.crash_loop = CrashLoop()
        self.suspects = Suspects(queue)
        self.page_index = PageIndex()
        self.last_loss: tuple[float, str] | None = None  # Time and reason of the last loss of a worker.
        self.last_end: tuple[bool, str] | None = None  # Whether the last worker to go was lost, and what became of it.
        self.counters = Counters()
        self._was_seated = False  # Whether a worker has been seated since the start.
        self.held_pools = HeldPools()
        self._generation, self._next_number = config.first_generation, 1

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
        """Returns the report of one event of the lane, if the config asks for reports.

        `plans` holds the plan of a confirmed step, or the plans that a reset made void, oldest first. A reset has a
        `cause`. A join has neither. Call it before the requests that a step ends leave their rows.
        """
        if not self._config.report_steps:
            return []
        counters, lanes = self.counters, self.seated
        prefill, decode = sum(plan.prefill_tokens for plan in plans), sum(plan.decode_tokens for plan in plans)
        report = StepReport(
            kind=_kind(cause, plans, prefill, decode),
            cause=cause,
            at=now,
            step=counters.steps,
            lane=lane.number,
            generation=lane.generation,
            running=lane.rows.num_seated,
            waiting=self._queue.num_waiting,
            prefill_tokens=prefill,
            decode_tokens=decode,
            output_tokens=output_tokens,
            pages_used=lane.pool.num_used,
            pages_cached=lane.pool.num_evictable,
            pages_total=lane.info.usable_pages,
            preemptions=counters.preemptions,
            compute_us=compute_us,
            span_seconds=now - plans[0].sent_at if plans else 0.0,
            workers=len(lanes),
            all_running=sum(one_lane.rows.num_seated for one_lane in lanes),
            all_pages_used=sum(one_lane.pool.num_used for one_lane in lanes),
            all_pages_cached=sum(one_lane.pool.num_evictable for one_lane in lanes),
            all_pages_total=sum(one_lane.info.usable_pages for one_lane in lanes),
        )
        return [report]

    def known(self, request: Request) -> int:
        """Returns the number of known tokens of a live request, also while it runs."""
        return int(self[request.worker].rows.known[request.row]) if request.row else request.known

    def join(self, event: ev.WorkerJoined, now: float) -> list[fx.Effect]:
        """Opens a lane for the worker, or refuses it with a reason."""
        info, worker = event.info, event.worker
        effects: list[fx.Effect] = []
        refusal = frame_refusal(self._config, info) or self._model_refusal(info, worker)
        if worker in self:
            what = "it joined again and is refused" if refusal else "it joined again"
            # The seat is still this worker's if it is accepted.
            effects += self.close(worker, what, now, is_death=False, seats=bool(refusal))
        if refusal:
            return [*effects, *refused_for_good(worker, refusal)]
        if len(self) == MAX_LANES:
            reason = f"{MAX_LANES} workers serve already; this one is accepted when one of them leaves"
            return [*effects, fx.WorkerRefused(worker=worker, reason=reason, retry=True)]
        self.held_pools.forget(info.pool_id, self.values())
        self._generation += 1
        number, index = self._next_number, self.page_index
        lane = Lane(worker=worker, number=number, info=info, generation=self._generation, now=now, page_index=index)
        self._next_number += 1
        self[worker] = lane
        self._list_lanes()
        effects += accept(lane, event.kept, self._config)
        if lane.phases.counts:
            effects += self.report(lane, now)
        return effects if self._config.prove_workers else effects + self._prove(lane, now)

    def _prove(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Lets a seated lane get requests, and announces its sizes to callers. A standby lane may be seated at once."""
        lane.prove(now)
        if not lane.phases.counts:
            return self.seat_due(now)
        self.held_pools.hand_over(lane, now)
        self.serving_changed()
        return [fx.WorkerProven(worker=lane.worker)]

    def serving_changed(self) -> None:
        """Announces the sizes of the serving workers, and looks again at requests that fitted none of them."""
        self._list_lanes()
        self.worker_infos.update(lane.info for lane in self.serving)
        self._queue.restore_set_aside()
        self._queue.unpark_all()

    def send_on(self, request: Request) -> None:
        """Puts a request that fills what its worker holds back into the queue, for a larger one."""
        if request.row:
            self.counters.preemptions += 1
            self[request.worker].unseat(request, Move.PREEMPT)
            self._queue.enqueue(request)

    def _list_lanes(self) -> None:
        """Updates `seated` and `serving`. Both are read in every step and change rarely."""
        self.seated = [lane for lane in self.values() if lane.phases.counts]
        self.serving = [lane for lane in self.seated if lane.phases.serves and lane.phases.stays]
        self._was_seated |= bool(self.seated)

    def first_proven(self) -> Lane | None:
        """Returns the standby lane that has been proven for the longest time and is not drained, None without one.

        One that has the newest weights comes first.
        """
        waiting = [
            (lane.phases.weights is not LanePhase.OPEN, lane.proven_at, lane.number, lane)
            for lane in self.values()
            if lane.phases.seat is LanePhase.STANDBY and lane.phases.stays
        ]
        return min(waiting)[3] if waiting else None

    def next_seating(self) -> float | None:
        """Returns when, on the core's clock, a standby worker is seated because no other has come; None: never.

        Once a worker has been seated since the core's start, a standby worker is due as soon as it is proven.
        """
        first = None if self.seated else self.first_proven()
        if first is None:
            return None
        return first.proven_at if self._was_seated else first.proven_at + PATIENCE_SECONDS

    def seat_due(self, now: float) -> list[fx.Effect]:
        """Seats a standby worker if no worker is seated and none is expected to come."""
        due = self.next_seating()
        return [] if due is None or now < due else self.seat_next(now)

    def seat_next(self, now: float) -> list[fx.Effect]:
        """Seats the first proven standby worker with a model that still matches, if any."""
        effects: list[fx.Effect] = []
        while (lane := self.first_proven()) is not None:
            if not (difference := self._model_refusal(lane.info, lane.worker)):
                return effects + self._seat(lane, now)
            effects += self._refuse_model(lane, difference, now)
        return effects

    def _seat(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Lets requests run on a proven standby worker."""
        lane.phases.move(LaneMove.SEAT)
        self.held_pools.hand_over(lane, now)
        self.serving_changed()
        note = fx.News(message=f"worker {lane.worker}, which was on standby, serves now")
        return [fx.WorkerProven(worker=lane.worker, was_standby=True), note, *self.report(lane, now)]

    def _model_refusal(self, info: WorkerInfo, worker: str) -> str:
        served = self.worker_infos.served
        others = [lane.info for lane in self.seated if lane.phases.serves and lane.worker != worker]
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
        is_orderly: bool = False,
        seats: bool = True,
    ) -> list[fx.Effect]:
        """Resets and removes the lane. If `is_death`, the loss may count towards a crash loop.

        `is_orderly`: the worker ends by its own decision or was drained, which logs no warning. If `seats`, a standby
        worker gets the seat of a worker that served, or of the last one that was seated.
        """
        lane = self.pop(worker)
        was_dismissed = lane.phases.stay is LanePhase.DISMISSED
        is_orderly |= was_dismissed
        end = "was drained" if was_dismissed else f"was lost: {reason}"
        self.last_end = not was_dismissed, f"the last one, {worker}, {end}"
        lane.pages.close()
        self._list_lanes()
        if is_death and not was_dismissed:
            self._count_death(lane, reason, now, cause)
        gone = f"worker {worker} {'has left' if is_orderly else 'lost'}: {reason}"
        if not lane.phases.counts:
            return [_line(f"{gone}; it was on standby", is_orderly=is_orderly)]
        # The pages of a worker that dies while it loads may be of either weights.
        outlives = cause in (*_DEATHS, ResetCause.DRAINED) and not lane.phases.is_loading
        pool_id = lane.pages.pool_id if outlives else b""
        effects = self.reset(lane, gone, now, cause, compute_us, keep_pages=bool(pool_id), is_orderly=is_orderly)
        self.held_pools.keep(lane, pool_id, now)
        if not was_dismissed:
            self.last_loss = now, reason
        return effects + self._vacate(lane, now, seats=seats)

    def _count_death(self, lane: Lane, reason: str, now: float, cause: ResetCause) -> None:
        """Makes suspects of the requests in flight at a worker's death, and counts it towards a crash loop."""
        serves, in_trial = lane.phases.serves, False
        if serves and cause in _DEATHS:
            in_trial, num_lanes = self.suspects.is_trial(lane.in_flight), len(self.serving) + 1
            self.suspects.implicate(lane, lane.in_flight, reason, is_step=False, num_lanes=num_lanes, now=now)
        # The death of a worker on probation or on standby does not count while another worker serves.
        if serves or not self.serving:
            self.crash_loop.died(reason, now, in_trial=in_trial)

    def _vacate(self, lane: Lane, now: float, *, seats: bool) -> list[fx.Effect]:
        """Announces the sizes of the workers that are left. If `seats`, a standby worker gets the lane's seat."""
        if lane.phases.serves:
            self.worker_infos.worker_left(lane.info, now)
            self.worker_infos.update(one.info for one in self.serving)
        is_free = not self.seated or lane.phases.seat is LanePhase.SERVING
        effects = self.seat_next(now) if seats and is_free else []
        if not self.worker_infos.present:
            self._queue.restore_set_aside()
        return effects

    def end_probation(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Proves the lane after its first step if its model still matches: other workers may be proven by now."""
        difference = self._model_refusal(lane.info, lane.worker)
        return self._refuse_model(lane, difference, now) if difference else self._prove(lane, now)

    def _refuse_model(self, lane: Lane, difference: str, now: float) -> list[fx.Effect]:
        closed = self.close(lane.worker, difference, now, is_death=False)
        return [*closed, *refused_for_good(lane.worker, difference)]

    def reset(
        self,
        lane: Lane,
        reason: str,
        now: float,
        cause: ResetCause,
        compute_us: int,
        *,
        keep_pages: bool,
        is_orderly: bool = False,
    ) -> list[fx.Effect]:
        """Resets the lane: its requests go back to the queue with all known tokens, its plans in flight become void."""
        void = tuple(lane.in_flight)
        self._generation += 1
        self.counters.resets_by_cause[cause] += 1
        requests = lane.reset(self._generation, keep_pages=keep_pages)
        # No request waits for the results of these plans, also none that was preempted before.
        for request in map(self._queue.by_handle, {handle for record in void for handle in record.handles.tolist()}):
            if request is not None:
                request.void_pending_plans()
        for request in requests:
            self._queue.enqueue(request)
        effects = [
            _line(f"{reason}; {numbered(len(requests), 'request', 'go')} back to the queue", is_orderly=is_orderly)
        ]
        if lane.phases.counts:
            effects += self.report(lane, now, void, cause=cause, compute_us=compute_us)
        return effects

    def reset_or_refuse(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """Handles a failed step: resets the lane, or refuses the worker after too many failed steps in a row."""
        if cause in _KEEPING_CAUSES:
            self.suspects.implicate(lane, [lane.in_flight[0]], reason, is_step=True, num_lanes=0, now=now)
            if self.suspects.convicted:
                lane.failed_steps = 0  # a request made them fail, not the worker
        lane.failed_steps += 1
        if lane.failed_steps < _MAX_FAILED_STEPS:
            keep_pages = cause in _KEEPING_CAUSES
            return self.reset(lane, f"worker {lane.worker}: {reason}", now, cause, compute_us, keep_pages=keep_pages)
        reason = f"{numbered(lane.failed_steps, 'failed step')} in a row without a confirmed one; the last: {reason}"
        return self.refuse_for_now(lane, reason, now, cause, compute_us)

    def refuse_for_now(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """Closes the lane and refuses the worker, which may join again."""
        refused = fx.WorkerRefused(worker=lane.worker, reason=reason, retry=True)
        return [*self.close(lane.worker, reason, now, cause, compute_us), refused]


def _kind(cause: ResetCause | None, plans: Sequence[SentPlan], prefill: int, decode: int) -> StepKind:
    if cause is not None:
        return StepKind.RESET
    if not plans:
        return StepKind.JOINED
    if prefill and decode:
        return StepKind.MIXED
    return StepKind.PREFILL if prefill else StepKind.DECODE


def _line(message: str, *, is_orderly: bool) -> fx.Effect:
    return fx.News(message=message) if is_orderly else fx.Note(message=message)
