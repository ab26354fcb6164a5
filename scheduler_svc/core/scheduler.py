"""The core: `handle(event, now) -> effects`, a pure state machine.

Owns every request, queue, page table and the one lane (one worker serves at a time; others stand by). Knows nothing of
sockets, clocks or randomness: the same events at the same times give the same effects, always.

Theory of operation. Events change state and answer at once; only `Tick`, sent when the inbox is drained, expires what
is due and plans, until the lane has `plans_in_flight` plans out or nothing is left to run. A result is read against
the in-flight record of its plan. Whatever goes wrong with a worker or a step (lost, failed, out of memory, out of step)
has one recovery: the lane is reset, its requests go back to the queue with all they know, and nothing was emitted that
a client could see twice. A request ends in exactly one terminal answer: Rejected, or an End.

Requests whose step failed are suspects: one at a time runs while all others pause, until it has sampled; one whose step
fails alone ends.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.admission import misfit, new_request, refusal
from scheduler_svc.core.book import Due, RequestBook
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.outbox import Outbox
from scheduler_svc.core.planner import plan_step
from scheduler_svc.core.request import Move, Phase, Request
from scheduler_svc.core.results import Ending, read_result

_RECENT_STEPS = 64
_MAX_FRUITLESS_RESETS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Bounds and patience of the core. Seconds are of its clock."""

    max_waiting: int = 1024
    max_waiting_tokens: int = 4_194_304
    plans_in_flight: int = 2
    step_timeout_seconds: float = 120.0
    silence_timeout_seconds: float = 15.0
    """A worker with no plan in flight that says nothing for so long is lost."""


class Scheduler:
    """See the module's docstring. Public state is for audits and tests; only `handle` changes it."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.book = RequestBook()
        self.lane: Lane | None = None
        self.info: ev.WorkerInfo | None = None
        """What is served, from the last worker that joined; its identity never changes."""
        self.draining = False
        self.frontends: dict[str, int] = {}
        """Live front ends and their index; indices are never used twice."""
        self.suspects: set[int] = set()
        self.steps = 0
        self.preemptions = 0
        self.lane_resets = 0
        self.output_tokens = 0
        self._generation = 0
        self._next_handle = 1
        self._next_frontend = 1
        self._eos = np.zeros(0, np.int32)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._outbox = Outbox()
        self._handlers: dict[type[Any], Callable[[Any, float], list[fx.Effect]]] = {
            ev.Submit: self._on_submit,
            ev.Cancel: self._on_cancel,
            ev.Finish: self._on_finish,
            ev.Abort: self._on_abort,
            ev.LoadQuery: self._on_load_query,
            ev.FrontendJoined: self._on_frontend_joined,
            ev.FrontendLost: self._on_frontend_lost,
            ev.WorkerJoined: self._on_worker_joined,
            ev.WorkerLost: self._on_worker_lost,
            ev.WorkerAlive: self._on_worker_alive,
            ev.StepDone: self._on_step_done,
            ev.Tick: self._on_tick,
            ev.DrainStarted: self._on_drain_started,
            ev.DrainEnded: self._on_drain_ended,
        }

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Takes one event at time `now` (seconds, never backwards); returns what is to be done, in order."""
        effects = self._handlers[type(event)](event, now)
        effects += self._outbox.flush(self.frontends)
        return effects

    def next_wake(self) -> float | None:
        """When a Tick is due although nothing happens; None: never."""
        moments = [at for at in (self.book.next_due(), self._lane_patience()) if at is not None]
        return min(moments, default=None)

    # Requests ------------------------------------------------------------------------------------------------

    def _on_submit(self, event: ev.Submit, now: float) -> list[fx.Effect]:
        if event.frontend not in self.frontends:
            message = "the core does not know this front end (any more); it must say hello first"
            return [
                fx.Rejected(
                    frontend=event.frontend,
                    stream=event.stream,
                    code=fx.RejectCode.NOT_READY,
                    message=message,
                    field="",
                )
            ]
        refusal = self._refusal(event)
        if refusal is not None:
            code, field, message = refusal
            return [fx.Rejected(frontend=event.frontend, stream=event.stream, code=code, message=message, field=field)]
        ahead = self.book.num_waiting
        assert self.info is not None
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        request = new_request(event, handle=handle, eos_token_ids=self.info.eos_token_ids, now=now)
        self.book.add(request)
        if event.max_time_seconds > 0:
            self.book.add_due(now + event.max_time_seconds, request, Due.TIME_LIMIT)
        if event.deadline_seconds > 0:
            self.book.add_due(now + event.deadline_seconds, request, Due.DEADLINE)
        return [fx.Admitted(frontend=event.frontend, stream=event.stream, requests_ahead=ahead)]

    def _refusal(self, event: ev.Submit) -> tuple[fx.RejectCode, str, str] | None:
        """Why the request may not enter: code, field, sentence. None: it may."""
        if self.info is None:
            return fx.RejectCode.NOT_READY, "", "no worker has joined yet"
        if self.draining:
            return fx.RejectCode.NOT_READY, "", "the service is shutting down"
        return refusal(
            event,
            info=self.info,
            book=self.book,
            max_waiting=self.config.max_waiting,
            max_waiting_tokens=self.config.max_waiting_tokens,
        )

    def _on_cancel(self, event: ev.Cancel, now: float) -> list[fx.Effect]:
        request = self.book.by_stream(event.frontend, event.stream)
        if request is not None:
            self._forget(request)
        return []

    def _on_finish(self, event: ev.Finish, now: float) -> list[fx.Effect]:
        request = self.book.by_stream(event.frontend, event.stream)
        if request is not None:
            self._end(request, now, reason=fx.EndReason.STOP_STRING, output_tokens=event.output_tokens)
        return []

    def _on_abort(self, event: ev.Abort, now: float) -> list[fx.Effect]:
        outcomes: list[tuple[str, bool]] = []
        for request_id in event.request_ids:
            request = self.book.by_id(request_id)
            outcomes.append((request_id, request is not None))
            if request is not None:
                self._end(request, now, reason=fx.EndReason.ABORTED)
        return [fx.AbortReply(frontend=event.frontend, query=event.query, outcomes=tuple(outcomes))]

    def _end(
        self,
        request: Request,
        now: float,
        *,
        reason: fx.EndReason | None = None,
        failure: fx.Failure | None = None,
        stop_token_id: int | None = None,
        output_tokens: int | None = None,
        broken: bool = False,
    ) -> None:
        """Ends a live request in every phase: frees it, forgets it, and queues its one terminal answer."""
        in_flight = self._forget(request, broken=broken)
        delivered = request.num_outputs
        kept = delivered if output_tokens is None else min(output_tokens, delivered)
        stats = request.stats(now=now, output_tokens=kept, discarded_tokens=in_flight + delivered - kept)
        self._outbox.add(
            request.frontend,
            fx.End(
                stream=request.stream,
                reason=reason,
                failure=failure,
                stop_token_id=stop_token_id,
                stats=stats,
            ),
        )

    def _forget(self, request: Request, *, broken: bool = False) -> int:
        """Frees a live request without an answer; returns how many samples are still in flight for it."""
        if request.phase is Phase.RUNNING:
            assert self.lane is not None
            self.lane.leave(request, Move.END, broken=broken)
        else:
            request.move(Move.END)
            self.book.uncount(request)
        self.book.remove(request)
        self.suspects.discard(request.handle)
        return request.late_samples

    # Front ends ----------------------------------------------------------------------------------------------

    def _on_frontend_joined(self, event: ev.FrontendJoined, now: float) -> list[fx.Effect]:
        self._drop_frontend(event.frontend)
        self.frontends[event.frontend] = self._next_frontend
        self._next_frontend += 1
        effects: list[fx.Effect] = [fx.ModelServed(frontend=event.frontend, info=self.info)]
        if self.draining:
            effects.append(fx.AnnounceDrain(frontend=event.frontend))
        return effects

    def _on_frontend_lost(self, event: ev.FrontendLost, now: float) -> list[fx.Effect]:
        self._drop_frontend(event.frontend)
        return []

    def _drop_frontend(self, frontend: str) -> None:
        if self.frontends.pop(frontend, None) is not None:
            for request in self.book.of_frontend(frontend):
                self._forget(request)

    def _on_load_query(self, event: ev.LoadQuery, now: float) -> list[fx.Effect]:
        lane = self.lane
        load = fx.Load(
            running=lane.rows.num_seated if lane else 0,
            waiting=self.book.num_waiting,
            waiting_tokens=self.book.waiting_tokens,
            pages_used=lane.pool.num_used if lane else 0,
            pages_total=lane.info.usable_pages if lane else 0,
            workers=1 if lane else 0,
            steps=self.steps,
            step_ms=1e3 * median(self._step_seconds) if self._step_seconds else 0.0,
            preemptions=self.preemptions,
            lane_resets=self.lane_resets,
            output_tokens=self.output_tokens,
            worker_pid=lane.info.pid if lane else 0,
        )
        return [fx.LoadReply(frontend=event.frontend, query=event.query, load=load)]

    # Workers -------------------------------------------------------------------------------------------------

    def _on_worker_joined(self, event: ev.WorkerJoined, now: float) -> list[fx.Effect]:
        info, lane = event.info, self.lane
        if self.info is not None and info.identity != self.info.identity:
            reason = (
                f"this service serves {self.info.model} (identity {self.info.identity[:12]}); the worker brings "
                f"{info.model} (identity {info.identity[:12]}): weights, config, tokenizer or page size differ"
            )
            return [fx.WorkerRefused(worker=event.worker, reason=reason, retry=False)]
        if lane is not None and lane.worker != event.worker:
            reason = f"worker {lane.worker} serves already; this one may stand by"
            return [fx.WorkerRefused(worker=event.worker, reason=reason, retry=True)]
        effects: list[fx.Effect] = []
        if lane is not None:
            effects += self._close_lane("it joined again", now)
        news = self.info is None or replace(self.info, pid=info.pid) != info
        self.info = info
        self._eos = np.array(info.eos_token_ids, np.int32)
        self._generation += 1
        self.lane = Lane(worker=event.worker, info=info, generation=self._generation, now=now)
        effects.append(fx.WorkerAccepted(worker=event.worker, generation=self._generation))
        if news:
            effects += [fx.ModelServed(frontend=frontend, info=info) for frontend in self.frontends]
        self._end_misfits(info, now)
        return effects

    def _end_misfits(self, info: ev.WorkerInfo, now: float) -> None:
        """A worker that came back smaller cannot run what the one before it could."""
        for request in self.book.waiting():
            reason = misfit(info, request.prompt_tokens, request.total_length - request.prompt_tokens)
            if reason is not None:
                self._end(request, now, failure=fx.Failure(code=fx.FailureCode.TOO_LARGE, message=reason))

    def _on_worker_lost(self, event: ev.WorkerLost, now: float) -> list[fx.Effect]:
        if self.lane is None or self.lane.worker != event.worker:
            return []
        return self._close_lane(event.reason, now)

    def _on_worker_alive(self, event: ev.WorkerAlive, now: float) -> list[fx.Effect]:
        if self.lane is None or self.lane.worker != event.worker:
            return [fx.AskRejoin(worker=event.worker)]
        self.lane.heard_at = now
        return []

    def _close_lane(self, reason: str, now: float) -> list[fx.Effect]:
        """The worker is gone: resets its lane and forgets it."""
        lane = self.lane
        assert lane is not None
        note = self._reset_lane(lane, f"worker {lane.worker} lost: {reason}")
        self.lane = None
        return [note]

    def _reset_or_give_up(self, lane: Lane, reason: str, now: float) -> list[fx.Effect]:
        """Resets the lane after a step that went wrong; a worker that gets nothing right is sent away for a while."""
        lane.fruitless_resets += 1
        if lane.fruitless_resets < _MAX_FRUITLESS_RESETS:
            return [self._reset_lane(lane, reason)]
        what = f"{lane.fruitless_resets} resets in a row without one confirmed step, the last one: {reason}"
        worker = lane.worker
        return [*self._close_lane(what, now), fx.WorkerRefused(worker=worker, reason=what, retry=True)]

    def _reset_lane(self, lane: Lane, reason: str) -> fx.Note:
        """The one recovery. Requests keep all they know; plans in flight are void; nothing is resent."""
        self._generation += 1
        self.lane_resets += 1
        for request in self.book.waiting():
            request.late_plans = request.late_samples = 0
        requests = lane.reset(self._generation)
        for request in requests:
            request.late_plans = request.late_samples = 0
            self.book.enqueue(request)
        return fx.Note(message=f"{reason}; {len(requests)} requests go back to the queue")

    def _lane_patience(self) -> float | None:
        """When the lane's worker has been silent for too long."""
        lane, config = self.lane, self.config
        if lane is None:
            return None
        if lane.in_flight:
            # The oldest plan may have been sent while others ran before it.
            return max(lane.in_flight[0].sent_at, lane.result_at) + config.step_timeout_seconds
        return lane.heard_at + config.silence_timeout_seconds

    # Steps ---------------------------------------------------------------------------------------------------

    def _on_step_done(self, event: ev.StepDone, now: float) -> list[fx.Effect]:
        lane = self.lane
        if lane is None or lane.worker != event.worker:
            return [fx.AskRejoin(worker=event.worker)]
        lane.heard_at = lane.result_at = now
        if event.generation != lane.generation:
            return []  # void
        record = lane.in_flight[0] if lane.in_flight else None
        if record is None or event.step != record.step:
            expected = record.step if record else "none"
            return self._reset_or_give_up(lane, f"a result for step {event.step} came, expected {expected}", now)
        if event.status is not ev.StepStatus.OK:
            return self._on_step_failed(lane, event, [int(handle) for handle in record.handles], now)
        assert self.info is not None
        if not _well_formed(event, len(record.sampled), self.info.vocab_size):
            worker = lane.worker
            effects = self._close_lane(f"its result for step {event.step} is malformed", now)
            return [*effects, fx.AskRejoin(worker=worker)]
        lane.in_flight.popleft()
        lane.fruitless_resets = 0
        self.steps += 1
        self._step_seconds.append(now - record.sent_at)
        delivery = read_result(
            lane=lane,
            book=self.book,
            record=record,
            tokens=event.tokens,
            nonfinite=event.nonfinite,
            eos=self._eos,
            frontend_idx=self.frontends,
            now=now,
        )
        if self.suspects:
            self.suspects.difference_update(int(handle) for handle in record.handles[record.sampled])
        self.output_tokens += len(delivery.tokens)
        for ending in delivery.endings:
            self._end_by(ending, now)
        return self._outbox.deliver(delivery, self.frontends)

    def _end_by(self, ending: Ending, now: float) -> None:
        request = ending.request
        request.last_token_at = now
        if ending.reason is not None:
            self._end(request, now, reason=ending.reason, stop_token_id=ending.stop_token_id)
            return
        message = f"request {request.request_id}: the model's output was not finite; the request was ended"
        self._end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=message), broken=True)

    def _on_step_failed(self, lane: Lane, event: ev.StepDone, handles: list[int], now: float) -> list[fx.Effect]:
        alone = len(set(handles)) == 1 and handles[0] in self.suspects
        effects = self._reset_or_give_up(lane, f"step {event.step} {event.status}: {event.detail}", now)
        if event.status in (ev.StepStatus.OUT_OF_SYNC, ev.StepStatus.SKIPPED):
            return effects
        culprit = self.book.by_handle(handles[0]) if alone else None
        if culprit is not None:
            message = f"request {culprit.request_id}: its step {event.status}, alone too: {event.detail}"
            self._end(culprit, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=message))
            lane.fruitless_resets = 0
        else:
            self.suspects.update(handle for handle in handles if self.book.by_handle(handle) is not None)
        return effects

    def _on_tick(self, event: ev.Tick, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        while (due := self.book.pop_due(now)) is not None:
            self._expire(*due, now)
        patience = self._lane_patience()
        if patience is not None and now >= patience:
            assert self.lane is not None
            worker = self.lane.worker
            what = "a step took too long" if self.lane.in_flight else "it has been silent for too long"
            effects += [*self._close_lane(what, now), fx.AskRejoin(worker=worker)]
        effects += self._plan(now)
        return effects

    def _expire(self, request: Request, due: Due, now: float) -> None:
        if due is Due.TIME_LIMIT:
            self._end(request, now, reason=fx.EndReason.TIME_LIMIT)
            return
        message = f"request {request.request_id}: its deadline passed after {now - request.arrived_at:.3f} s"
        self._end(request, now, failure=fx.Failure(code=fx.FailureCode.DEADLINE, message=message))

    def _plan(self, now: float) -> list[fx.Effect]:
        lane = self.lane
        effects: list[fx.Effect] = []
        while lane is not None and len(lane.in_flight) < self.config.plans_in_flight:
            before = self.book.num_waiting
            plan = plan_step(
                lane=lane,
                book=self.book,
                suspects=self.suspects,
                frontend_idx=self.frontends.__getitem__,
                now=now,
            )
            # A step that preempts admits nobody, so more waiting means so many preempted.
            self.preemptions += max(0, self.book.num_waiting - before)
            if plan is None:
                break
            effects.append(fx.SendPlan(worker=lane.worker, plan=plan))
        return effects

    # The end -------------------------------------------------------------------------------------------------

    def _on_drain_started(self, event: ev.DrainStarted, now: float) -> list[fx.Effect]:
        self.draining = True
        return [fx.AnnounceDrain(frontend=frontend) for frontend in self.frontends]

    def _on_drain_ended(self, event: ev.DrainEnded, now: float) -> list[fx.Effect]:
        message = "the service shut down before the request was done"
        for request in list(self.book):
            self._end(request, now, failure=fx.Failure(code=fx.FailureCode.SHUTDOWN, message=message))
        return []


def _well_formed(event: ev.StepDone, num_sampled: int, vocab_size: int) -> bool:
    """Whether the result has a token of the vocabulary for each sampled row; those not finite mean nothing."""
    if len(event.tokens) != num_sampled or not _within(event.nonfinite, num_sampled):
        return False
    if not len(event.nonfinite):
        return _within(event.tokens, vocab_size)
    return _within(np.delete(event.tokens, event.nonfinite), vocab_size)


def _within(values: ev.Int32Array, limit: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < limit)
