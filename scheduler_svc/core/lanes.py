"""The workers' side of the core: who serves, what was sent, what came back, and the one recovery.

Owns the lanes, the generations and the suspects. It ends no request: it says whom a step ends.

Whatever goes wrong with a worker or a step (lost, failed, out of memory, out of step) is answered alike: its lane is
reset, its requests go back to the queue with all they know, and whichever lane has room takes them over. Requests whose
step failed are suspects: one at a time runs while all others of its lane pause, until it has sampled; one whose step
fails alone ends. A worker that gets nothing right is sent away for a while.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LANES, CoreConfig
from scheduler_svc.core.messages.plan import InFlight
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.schedule import placement as routing
from scheduler_svc.core.schedule.plan_builder import Counters
from scheduler_svc.core.schedule.plan_size import largest_plan_bytes
from scheduler_svc.core.schedule.planner import plan_step
from scheduler_svc.core.schedule.probation import probation_plan
from scheduler_svc.core.state.crash_loop import CrashLoop
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request_queue import RequestBook
from scheduler_svc.core.state.worker_offers import Offers
from scheduler_svc.core.update import step_reports
from scheduler_svc.core.update.check_result import is_sound
from scheduler_svc.core.update.results import Delivery, Ending, read_result

_RECENT_STEPS = 64
_MAX_FRUITLESS_RESETS = 5
_CAUSES = {
    ev.StepStatus.SKIPPED: ResetCause.SKIPPED,
    ev.StepStatus.FAILED: ResetCause.STEP_FAILED,
    ev.StepStatus.OUT_OF_MEMORY: ResetCause.OUT_OF_MEMORY,
    ev.StepStatus.OUT_OF_SYNC: ResetCause.OUT_OF_SYNC,
}
# After these the worker holds what its confirmed steps wrote; after others nobody knows what it holds.
_KEEPING_CAUSES = (ResetCause.STEP_FAILED, ResetCause.OUT_OF_MEMORY)


class Lanes:
    """`of` worker: its lane. All serve one model, in one way."""

    def __init__(self, config: CoreConfig, book: RequestBook) -> None:
        self._config = config
        self._book = book
        self.of: dict[str, Lane] = {}
        self.offers = Offers(config.max_worker_wait_seconds)
        self.crash_loop = CrashLoop()
        self.last_loss: tuple[float, str] | None = None
        """When a worker was last lost, and why."""
        self.suspects: set[int] = set()
        """Handles of live requests."""
        self.counters = Counters()
        self._generation = 0
        self._next_number = 1
        self._eos = np.zeros(0, np.int32)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    @property
    def step_ms(self) -> float:
        """Median of the last steps, plan sent to result read; 0 before the first."""
        return 1e3 * median(self._step_seconds) if self._step_seconds else 0.0

    def _report(
        self,
        lane: Lane,
        now: float,
        plans: Sequence[InFlight] = (),
        *,
        cause: ResetCause | None = None,
        output_tokens: int = 0,
        compute_us: int = 0,
    ) -> list[fx.Effect]:
        """The report of one event of the lane, if the config asks for reports."""
        if not self._config.report_steps:
            return []
        totals = step_reports.Totals(self.counters.steps, self.counters.preemptions, self._book.num_waiting)
        return [step_reports.step_report(totals, self.of.values(), lane, now, plans, cause, output_tokens, compute_us)]

    # Workers -------------------------------------------------------------------------------------------------

    def join(self, event: ev.WorkerJoined, now: float) -> list[fx.Effect]:
        """Opens a lane for the worker, or says why not."""
        info, worker = event.info, event.worker
        effects: list[fx.Effect] = []
        refusal = self._frame_too_large(info) or self._difference(info, worker)
        if worker in self.of:
            what = "it came back as another" if refusal else "it joined again"
            effects += self.close(worker, what, now, is_death=False)
        if refusal:
            return [*effects, *_refused_for_good(worker, refusal)]
        if len(self.of) == MAX_LANES:
            reason = f"{MAX_LANES} workers serve already; this one may stand by"
            return [*effects, fx.WorkerRefused(worker=worker, reason=reason, retry=True)]
        self._generation += 1
        lane = Lane(worker=worker, number=self._next_number, info=info, generation=self._generation, now=now)
        self._next_number += 1
        self.of[worker] = lane
        effects.append(fx.WorkerAccepted(worker=worker, generation=self._generation))
        effects += self._report(lane, now)
        if not self._config.prove_workers:
            effects += self._prove(lane)
        return effects

    def _prove(self, lane: Lane) -> list[fx.Effect]:
        """From now on the lane takes requests, and its sizes count."""
        lane.is_proven = True
        self._eos = np.array(lane.info.eos_token_ids, np.int32)
        self.offers.update(self._proven_infos())
        self._book.unpark()
        return [fx.WorkerProven(worker=lane.worker)]

    def _proven_infos(self) -> list[WorkerInfo]:
        return [lane.info for lane in self.of.values() if lane.is_proven]

    def _plan_bytes(self, info: WorkerInfo) -> int:
        """Bytes up to which a plan for such a worker starts rows: half of a small frame stays for the rest of it."""
        return min(self._config.max_plan_bytes, info.max_frame_bytes // 2)

    def _frame_too_large(self, info: WorkerInfo) -> str:
        """Why no plan bound can keep every plan within the worker's frames; empty: it can."""
        needed = largest_plan_bytes(info, self._plan_bytes(info))
        if needed <= info.max_frame_bytes:
            return ""
        return (
            f"max_length is {info.max_length} and num_pages {info.num_pages}: a plan for them may have {needed} bytes; "
            f"the worker takes frames of {info.max_frame_bytes}; choose a smaller max_length"
        )

    def _difference(self, info: WorkerInfo, worker: str) -> str:
        """Why the worker may not serve beside the others, or after those before it; empty: it may."""
        if self.offers.served is None:
            return ""
        ours = self.offers.served.info
        if info.identity != ours.identity:
            what = "weights, config or tokenizer differ"
            if ours.page_size != info.page_size:
                what = f"pages of {info.page_size} tokens instead of {ours.page_size}"
            return (
                f"this service serves {ours.model} (identity {ours.identity[:12]}); the worker brings "
                f"{info.model} (identity {info.identity[:12]}): {what}; bring the same, or start the scheduler anew"
            )
        others = [lane.info for name, lane in self.of.items() if name != worker and lane.is_proven]
        if others and (info.window, info.sink_tokens) != (others[0].window, others[0].sink_tokens):
            return (
                f"the workers that serve see {_sight(others[0])}; this one sees {_sight(info)}, so the same request "
                "would be answered differently; bring the same, or start the scheduler anew"
            )
        return ""

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
        """The worker is gone: resets its lane and forgets it. `is_death`: it did not say goodbye."""
        lane = self.of.pop(worker)
        effects = self._reset(lane, f"worker {worker} lost: {reason}", now, cause, compute_us)
        self.last_loss = now, reason
        # A stray that never served does not count while a worker serves.
        if is_death and (lane.is_proven or not self._proven_infos()):
            self.crash_loop.died(reason, now)
        if lane.is_proven:
            self.offers.left(lane.info, now)
            self.offers.update(self._proven_infos())
        if not self.offers.present:
            self._book.unpark()
        return effects

    def patience(self) -> float | None:
        """When the first worker has been silent for too long; None: nobody serves."""
        return min(map(self._patience_with, self.of.values()), default=None)

    def _patience_with(self, lane: Lane) -> float:
        config = self._config
        if lane.in_flight:
            return lane.waits_since() + config.step_timeout_seconds
        return lane.heard_at + config.silence_timeout_seconds

    def check_patience(self, now: float) -> list[fx.Effect]:
        """Gives workers up that have been silent for too long; one that still lives may join again."""
        effects: list[fx.Effect] = []
        for worker, lane in list(self.of.items()):
            if now >= self._patience_with(lane):
                what = "a step took too long" if lane.in_flight else "it has been silent for too long"
                effects += self.close(worker, what, now, ResetCause.WORKER_SILENT)
                effects.append(fx.AskRejoin(worker=worker))
        return effects

    def _reset(self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int) -> list[fx.Effect]:
        """The one recovery. Requests keep all they know; plans in flight are void; nothing is resent."""
        void = tuple(lane.in_flight)
        self._generation += 1
        self.counters.resets += 1
        # Whoever lost its row while plans named it waits for them no longer.
        for handle in {handle for record in void for handle in record.handles.tolist()}:
            request = self._book.by_handle(handle)
            if request is not None and not request.row:
                request.late_plans = request.late_samples = 0
        requests = lane.reset(self._generation, keep_pages=cause in _KEEPING_CAUSES)
        for request in requests:
            request.late_plans = request.late_samples = 0
            self._book.enqueue(request)
        effects: list[fx.Effect] = [fx.Note(message=f"{reason}; {len(requests)} requests go back to the queue")]
        return effects + self._report(lane, now, void, cause=cause, compute_us=compute_us)

    def _reset_or_send_away(
        self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """After a step that went wrong."""
        lane.fruitless_resets += 1
        if lane.fruitless_resets < _MAX_FRUITLESS_RESETS:
            return self._reset(lane, reason, now, cause, compute_us)
        reason = f"{lane.fruitless_resets} resets in a row without one confirmed step, the last one: {reason}"
        return self._send_away(lane, reason, now, cause, compute_us)

    def _send_away(self, lane: Lane, reason: str, now: float, cause: ResetCause, compute_us: int) -> list[fx.Effect]:
        """The worker may come back, but not at once."""
        refused = fx.WorkerRefused(worker=lane.worker, reason=reason, retry=True)
        return [*self.close(lane.worker, reason, now, cause, compute_us), refused]

    def flush(self) -> int:
        """Forgets every page that is kept; returns how many there were."""
        for lane in self.of.values():
            lane.found.clear()
        return sum(lane.pool.forget_all() + lane.host.forget_all() for lane in self.of.values())

    # Steps ---------------------------------------------------------------------------------------------------

    def plan(self, frontends: Mapping[str, int], now: float) -> list[fx.Effect]:
        """Plans until each lane has enough in flight or nothing can run."""
        effects: list[fx.Effect] = []
        has_planned = True
        while has_planned:
            has_planned = False
            for lane in routing.by_backlog(self.of.values()):
                if len(lane.in_flight) >= self._config.plans_in_flight:
                    continue
                if not lane.is_proven:
                    if not lane.in_flight:
                        plan = probation_plan(lane, max_bytes=self._plan_bytes(lane.info), now=now)
                        effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
                    continue
                plan = plan_step(
                    lane=lane,
                    book=self._book,
                    suspects=self.suspects,
                    rivals=[other for other in self.of.values() if other is not lane and other.is_proven],
                    frontend_idx=frontends.__getitem__,
                    counters=self.counters,
                    policy=self._config.policy,
                    max_bytes=self._plan_bytes(lane.info),
                    now=now,
                )
                if plan is not None:
                    effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
                    has_planned = True
        return effects

    def read(
        self, event: ev.StepDone, frontends: Mapping[str, int], now: float
    ) -> tuple[list[fx.Effect], Delivery | None, list[Ending]]:
        """Reads a result: what is to be done, the step's tokens if it went well, and whom it ends."""
        lane = self.of.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)], None, []
        lane.heard_at = lane.result_at = now
        if event.generation != lane.generation:
            return [], None, []  # void
        record = lane.in_flight[0] if lane.in_flight else None
        if record is None or event.step != record.step:
            expected = record.step if record else "none"
            what = f"a result for step {event.step} came, expected {expected}"
            cause = ResetCause.WRONG_STEP
            return self._reset_or_send_away(lane, what, now, cause, event.compute_us), None, []
        if event.status is not ev.StepStatus.OK:
            return self._failed(lane, event, {int(handle) for handle in record.handles}, now)
        if not is_sound(event, record, lane.info.vocab_size):
            what = f"its result for step {event.step} is malformed"
            return self._send_away(lane, what, now, ResetCause.MALFORMED, event.compute_us), None, []
        lane.in_flight.popleft()
        lane.found.clear()
        lane.fruitless_resets = 0
        if not lane.is_proven:
            return self._end_probation(lane, now), None, []
        self.counters.steps += 1
        self._step_seconds.append(now - record.sent_at)
        delivery = read_result(
            lane=lane,
            book=self._book,
            record=record,
            event=event,
            eos=self._eos,
            frontend_idx=frontends,
            now=now,
        )
        for ending in delivery.endings:
            if ending.failure is not None:
                lane.distrust(ending.request)
        if len(delivery.tokens):
            self.crash_loop.confirmed()
        if self.suspects:
            self.suspects.difference_update(int(handle) for handle in record.handles[record.sampled])
        num_tokens = len(delivery.tokens)
        reports = self._report(lane, now, (record,), output_tokens=num_tokens, compute_us=event.compute_us)
        return reports, delivery, delivery.endings

    def _end_probation(self, lane: Lane, now: float) -> list[fx.Effect]:
        """The lane's first step went well. Another worker may have been proven since it joined."""
        difference = self._difference(lane.info, lane.worker)
        if not difference:
            return self._prove(lane)
        effects = self.close(lane.worker, difference, now, is_death=False)
        return [*effects, *_refused_for_good(lane.worker, difference)]

    def _failed(
        self, lane: Lane, event: ev.StepDone, handles: set[int], now: float
    ) -> tuple[list[fx.Effect], Delivery | None, list[Ending]]:
        culprits = handles & self.suspects if len(handles) == 1 else set[int]()
        what = f"step {event.step} {event.status}: {event.detail}"
        effects = self._reset_or_send_away(lane, what, now, _CAUSES[event.status], event.compute_us)
        if event.status in (ev.StepStatus.OUT_OF_SYNC, ev.StepStatus.SKIPPED):
            return effects, None, []
        for handle in culprits:
            culprit = self._book.by_handle(handle)
            assert culprit is not None, "a suspect that is not live"
            lane.fruitless_resets = 0
            message = f"request {culprit.request_id}: its step {event.status}, alone too: {event.detail}"
            return effects, None, [Ending.broken(culprit, message)]
        self.suspects.update(handle for handle in handles if self._book.by_handle(handle) is not None)
        return effects, None, []


def _refused_for_good(worker: str, reason: str) -> list[fx.Effect]:
    note = fx.Note(message=f"worker {worker} refused: {reason}")
    return [note, fx.WorkerRefused(worker=worker, reason=reason, retry=False)]


def _sight(info: WorkerInfo) -> str:
    if not info.window:
        return "the whole past"
    return f"{info.window} tokens back and the first {info.sink_tokens}"
