"""The worker's side of the core: who serves, what was sent, what came back, and the one recovery.

Owns the lane, the generation and the suspects. It ends no request: it says whom a step ends.

Whatever goes wrong with a worker or a step (lost, failed, out of memory, out of step) is answered alike: the lane is
reset, its requests go back to the queue with all they know. Requests whose step failed are suspects: one at a time runs
while all others pause, until it has sampled; one whose step fails alone ends. A worker that gets nothing right is sent
away for a while.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np

from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core import step_reports
from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.planner import plan_step
from scheduler_svc.core.results import Delivery, Ending, read_result
from scheduler_svc.core.soundness import is_sound

_RECENT_STEPS = 64
_MAX_FRUITLESS_RESETS = 5
_CAUSES = {
    ev.StepStatus.SKIPPED: fx.ResetCause.SKIPPED,
    ev.StepStatus.FAILED: fx.ResetCause.STEP_FAILED,
    ev.StepStatus.OUT_OF_MEMORY: fx.ResetCause.OUT_OF_MEMORY,
    ev.StepStatus.OUT_OF_SYNC: fx.ResetCause.OUT_OF_SYNC,
}


class LaneKeeper:
    """One worker serves at a time; others are told to stand by."""

    def __init__(self, config: CoreConfig, book: RequestBook) -> None:
        self._config = config
        self._book = book
        self.lane: Lane | None = None
        self.info: ev.WorkerInfo | None = None
        """What is served, from the last worker that joined; its identity never changes."""
        self.suspects: set[int] = set()
        """Handles of live requests."""
        self.steps = 0
        self.preemptions = 0
        self.resets = 0
        self._generation = 0
        self._eos = np.zeros(0, np.int32)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    @property
    def step_ms(self) -> float:
        """Median of the last steps, plan sent to result read; 0 before the first."""
        return 1e3 * median(self._step_seconds) if self._step_seconds else 0.0

    def _totals(self) -> step_reports.Totals:
        return step_reports.Totals(self.steps, self.preemptions)

    def is_serving(self, worker: str) -> bool:
        """Whether this worker's lane is open."""
        return self.lane is not None and self.lane.worker == worker

    # Workers -------------------------------------------------------------------------------------------------

    def join(self, event: ev.WorkerJoined, now: float) -> list[fx.Effect]:
        """Opens a lane for the worker, or says why not."""
        info, lane = event.info, self.lane
        if self.info is not None and info.identity != self.info.identity:
            reason = (
                f"this service serves {self.info.model} (identity {self.info.identity[:12]}); the worker brings "
                f"{info.model} (identity {info.identity[:12]}): {_difference(self.info, info)}; bring the same, or "
                "start the scheduler anew"
            )
            effects = self.close("it came back as another", now) if self.is_serving(event.worker) else []
            note = fx.Note(message=f"worker {event.worker} refused: {reason}")
            return [*effects, note, fx.WorkerRefused(worker=event.worker, reason=reason, retry=False)]
        if lane is not None and lane.worker != event.worker:
            reason = f"worker {lane.worker} serves already; this one may stand by"
            return [fx.WorkerRefused(worker=event.worker, reason=reason, retry=True)]
        effects = self.close("it joined again", now) if lane is not None else []
        self.info = info
        self._eos = np.array(info.eos_token_ids, np.int32)
        self._generation += 1
        self.lane = Lane(worker=event.worker, info=info, generation=self._generation, now=now)
        effects.append(fx.WorkerAccepted(worker=event.worker, generation=self._generation))
        if self._config.report_steps:
            effects.append(step_reports.joined(self._totals(), self.lane, self._book, now))
        return effects

    def close(
        self, reason: str, now: float, cause: fx.ResetCause = fx.ResetCause.WORKER_LOST, compute_us: int = 0
    ) -> list[fx.Effect]:
        """The worker is gone: resets its lane and forgets it."""
        lane = self.lane
        assert lane is not None
        effects = self._reset(lane, f"worker {lane.worker} lost: {reason}", now, cause, compute_us)
        self.lane = None
        return effects

    def patience(self) -> float | None:
        """When the worker has been silent for too long."""
        lane, config = self.lane, self._config
        if lane is None:
            return None
        if lane.in_flight:
            # The oldest plan may have been sent while others ran before it.
            return max(lane.in_flight[0].sent_at, lane.result_at) + config.step_timeout_seconds
        return lane.heard_at + config.silence_timeout_seconds

    def check_patience(self, now: float) -> list[fx.Effect]:
        """Gives a worker up that has been silent for too long; if it still lives, it may join again."""
        patience = self.patience()
        if patience is None or now < patience:
            return []
        assert self.lane is not None
        worker = self.lane.worker
        what = "a step took too long" if self.lane.in_flight else "it has been silent for too long"
        return [*self.close(what, now, fx.ResetCause.WORKER_SILENT), fx.AskRejoin(worker=worker)]

    def _reset(self, lane: Lane, reason: str, now: float, cause: fx.ResetCause, compute_us: int) -> list[fx.Effect]:
        """The one recovery. Requests keep all they know; plans in flight are void; nothing is resent."""
        void = tuple(lane.in_flight)
        self._generation += 1
        self.resets += 1
        for request in self._book.waiting():
            request.late_plans = request.late_samples = 0
        requests = lane.reset(self._generation)
        for request in requests:
            request.late_plans = request.late_samples = 0
            self._book.enqueue(request)
        effects: list[fx.Effect] = [fx.Note(message=f"{reason}; {len(requests)} requests go back to the queue")]
        if self._config.report_steps:
            effects.append(step_reports.reset(self._totals(), lane, self._book, now, cause, void, compute_us))
        return effects

    def _reset_or_send_away(
        self, lane: Lane, reason: str, now: float, cause: fx.ResetCause, compute_us: int
    ) -> list[fx.Effect]:
        """After a step that went wrong."""
        lane.fruitless_resets += 1
        if lane.fruitless_resets < _MAX_FRUITLESS_RESETS:
            return self._reset(lane, reason, now, cause, compute_us)
        reason = f"{lane.fruitless_resets} resets in a row without one confirmed step, the last one: {reason}"
        return self._send_away(lane, reason, now, cause, compute_us)

    def _send_away(self, lane: Lane, reason: str, now: float, cause: fx.ResetCause, compute_us: int) -> list[fx.Effect]:
        """The worker may come back, but not at once."""
        refused = fx.WorkerRefused(worker=lane.worker, reason=reason, retry=True)
        return [*self.close(reason, now, cause, compute_us), refused]

    # Steps ---------------------------------------------------------------------------------------------------

    def plan(self, frontends: Mapping[str, int], now: float) -> list[fx.Effect]:
        """Plans until enough are in flight or nothing can run."""
        lane = self.lane
        effects: list[fx.Effect] = []
        while lane is not None and len(lane.in_flight) < self._config.plans_in_flight:
            before = self._book.num_waiting
            plan = plan_step(
                lane=lane, book=self._book, suspects=self.suspects, frontend_idx=frontends.__getitem__, now=now
            )
            # A step that preempts admits nobody, so more waiting means so many preempted.
            self.preemptions += max(0, self._book.num_waiting - before)
            if plan is None:
                break
            effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
        return effects

    def read(
        self, event: ev.StepDone, frontends: Mapping[str, int], now: float
    ) -> tuple[list[fx.Effect], Delivery | None, list[Ending]]:
        """Reads a result: what is to be done, the step's tokens if it went well, and whom it ends."""
        lane = self.lane
        if lane is None or lane.worker != event.worker:
            return [fx.AskRejoin(worker=event.worker)], None, []
        lane.heard_at = lane.result_at = now
        if event.generation != lane.generation:
            return [], None, []  # void
        record = lane.in_flight[0] if lane.in_flight else None
        if record is None or event.step != record.step:
            expected = record.step if record else "none"
            what = f"a result for step {event.step} came, expected {expected}"
            cause = fx.ResetCause.WRONG_STEP
            return self._reset_or_send_away(lane, what, now, cause, event.compute_us), None, []
        if event.status is not ev.StepStatus.OK:
            return self._failed(lane, event, {int(handle) for handle in record.handles}, now)
        if not is_sound(event, record, lane.info.vocab_size):
            what = f"its result for step {event.step} is malformed"
            return self._send_away(lane, what, now, fx.ResetCause.MALFORMED, event.compute_us), None, []
        lane.in_flight.popleft()
        lane.fruitless_resets = 0
        self.steps += 1
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
        if self.suspects:
            self.suspects.difference_update(int(handle) for handle in record.handles[record.sampled])
        if not self._config.report_steps:
            return [], delivery, delivery.endings
        num_tokens = len(delivery.tokens)
        report = step_reports.confirmed(self._totals(), lane, self._book, now, record, num_tokens, event.compute_us)
        return [report], delivery, delivery.endings

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


def _difference(ours: ev.WorkerInfo, theirs: ev.WorkerInfo) -> str:
    if ours.page_size != theirs.page_size:
        return f"pages of {theirs.page_size} tokens instead of {ours.page_size}"
    return "weights, config or tokenizer differ"
