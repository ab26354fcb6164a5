"""The core: `handle(event, now) -> effects`, a pure state machine.

`Scheduler` owns all requests and front ends, and through `Lanes` the lane of each worker. It uses no sockets, clocks or
randomness: the same events at the same times give the same effects.

`handle` applies one event and returns its effects at once. `Tick` arrives when the inbox is empty. Only on a Tick does
the core expire deadlines and make plans, until each lane has `plans_in_flight` plans in flight or nothing can run. A
result is interpreted with the stored record of its plan (`SentPlan`). A token is emitted only after the result of its
step has arrived, so a failing worker never makes a client see a token twice. A request ends with exactly one terminal
answer, Rejected or End, unless its front end cancels it or disconnects.
"""

from collections.abc import Callable
from typing import Any

from scheduler_svc.core import faults
from scheduler_svc.core.drains import Drains
from scheduler_svc.core.lanes import Lanes, flush
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import ClearQuarantine, QuarantineQuery, QuarantineRestored, RequestsQuery
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.quarantine import Convictions
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.requests.acceptance import Acceptance
from scheduler_svc.core.requests.lingering import Lingering
from scheduler_svc.core.requests.listing import Listing
from scheduler_svc.core.requests.refusals import Refusals
from scheduler_svc.core.schedule.endings import Ending, stats_of
from scheduler_svc.core.schedule.results import OutputCollector
from scheduler_svc.core.state.request import Move, Phase, Request
from scheduler_svc.core.status import Announcer, Availability, load_of
from scheduler_svc.core.steps import Steps
from scheduler_svc.core.waits import Waits
from scheduler_svc.core.weights import Updates


class Scheduler:
    """The state machine. Only `handle` changes its state; audits and tests read it."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.queue = RequestQueue()
        self._lanes = lanes = Lanes(config, self.queue)
        self.lanes = lanes.by_worker
        """Lanes by the worker's name, the longest joined first; those of standby workers too."""
        self.suspects, self.held_pools, self.counters = lanes.suspects, lanes.held_pools, lanes.counters
        self._steps = Steps(config, self.queue, lanes, self._end)
        self.preparations = self._steps.preparations
        self.convictions = Convictions(config, lanes)
        self.frontends: dict[str, int] = {}
        """Index of each connected front end, by name; an index is never used twice."""
        self.output_tokens = 0
        self._next_frontend = 1
        self.availability = availability = Availability(lanes)
        self._waits = Waits(self.queue, lanes, availability)
        self._announcer = Announcer(config, self.queue, lanes, availability)
        self._seen_revision = lanes.worker_infos.revision
        self._output = OutputCollector(report_detached=config.report_detached)
        self._acceptance = Acceptance(config, self.queue, lanes, self._waits, self.preparations, self._end)
        sources = self.preparations.sources
        self._refusals = Refusals(config, self.queue, lanes, availability, self.convictions, sources)
        self._lingering = Lingering(config, self.queue, lanes, availability, self._remove)
        self.kept = self._lingering.kept
        self._listing = Listing(self.queue, lanes, availability, self._waits, self._lingering)
        self.drains = Drains(config, self.queue, lanes, self.frontends, self._end)
        self.weights = Updates(config, self.queue, lanes, self.frontends, self._end)
        self.outputs_of = self._lingering.outputs_of
        self.spans_of = self._lingering.spans_of
        self._handlers: dict[type[Any], Callable[[Any, float], list[fx.Effect]]] = {
            ev.Submit: self._on_submit,
            ev.Resume: lambda event, now: self._lingering.resume(event, self.frontends, now),
            ev.Restored: self._on_restored,
            ev.Cancel: self._on_cancel,
            ev.Finish: self._on_finish,
            ev.Abort: self._on_abort,
            ev.LoadQuery: self._on_load_query,
            ev.FlushCache: self._on_flush_cache,
            RequestsQuery: self._listing.answer,
            QuarantineQuery: self.convictions.answer,
            ClearQuarantine: self.convictions.answer,
            QuarantineRestored: self.convictions.restore,
            ev.FrontendJoined: self._on_frontend_joined,
            ev.FrontendLost: lambda event, now: self._drop_frontend(event.frontend, now),
            ev.WorkerJoined: self._lanes.join,
            ev.WorkerLost: self._on_worker_lost,
            ev.WorkerStops: self.drains.worker_stops,
            ev.WorkerAlive: lambda event, now: faults.heard(self._lanes, event, now),
            ev.StepDone: self._on_step_done,
            ev.ConstraintReady: self.preparations.answered,
            ev.TenantsChanged: self._on_tenants_changed,
            ev.Tick: self._on_tick,
            ev.Paused: self._on_paused,
            ev.Drain: self.drains.begin,
            ev.DrainStarted: lambda event, now: self.drains.stop(now),
            ev.DrainEnded: self.drains.ended,
            ev.UpdateWeights: self.weights.asked,
            ev.WeightsLoaded: self.weights.loaded,
            ev.WeightsRestored: self.weights.restored,
        }

    @property
    def info(self) -> WorkerInfo | None:
        """The largest worker that serves; if none serves, the last one that did. None until a worker is proven."""
        served = self._lanes.worker_infos.served
        return None if served is None else served.info

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Handles one event at time `now` (seconds, never decreasing); returns the effects in order."""
        effects = self._handlers[type(event)](event, now)
        if self._lanes.suspects.has_convicted:
            effects += self._end_convicted(now)
        if self._lanes.worker_infos.revision != self._seen_revision:
            effects += self._on_workers_changed(now)
        effects += self._output.flush(self.frontends)
        return effects

    def next_wake(self) -> float | None:
        """Time of the next Tick if no event arrives before it; None if nothing is due."""
        lanes, first = self._lanes, faults.next_timeout(self._lanes, self.config)
        of_lanes = (
            self.weights.next_wake(),
            lanes.next_seating(),
            lanes.worker_infos.next_expiry(),
            lanes.suspects.waits_until,
            self._waits.next_wake(),
        )
        for at in (self.queue.next_deadline(), self.kept.next_expiry(), self.drains.next_wake(), *of_lanes):
            if at is not None and (first is None or at < first):
                first = at
        return first

    # Requests ------------------------------------------------------------------------------------------------

    def _on_submit(self, event: ev.Submit, now: float) -> list[fx.Effect]:
        is_registered = event.frontend in self.frontends
        rejected = self._refusals.rejected(event, now, is_registered=is_registered, is_draining=self.drains.is_stopping)
        if rejected is not None:
            return [rejected]
        ahead = self.queue.num_waiting
        first_handle = self._acceptance.accept(event, now)
        forgotten = self._lingering.accepted(event, first_handle, now)
        self._listing.accepted(first_handle, event.request_id, now)
        return [*forgotten, fx.Admitted(frontend=event.frontend, stream=event.stream, requests_ahead=ahead)]

    def _on_restored(self, event: ev.Restored, now: float) -> list[fx.Effect]:
        first_handle = self._acceptance.take_handles(event.submit.num_samples)
        effects = self._lingering.restored(event, first_handle, now)
        self._listing.accepted(first_handle, event.submit.request_id, now)
        return effects

    def _on_cancel(self, event: ev.Cancel, now: float) -> list[fx.Effect]:
        if event.detach:
            return self._lingering.reader_lost(event.frontend, event.stream, now)
        request = self.queue.by_stream(event.frontend, event.stream)
        if request is None:
            return []
        self._remove(request, now)
        return self._lingering.canceled(request, now)

    def _on_finish(self, event: ev.Finish, now: float) -> list[fx.Effect]:
        request = self.queue.by_stream(event.frontend, event.stream)
        if request is not None:
            self._end(request, now, reason=fx.EndReason.STOP_STRING, output_tokens=event.output_tokens)
        return []

    def _on_abort(self, event: ev.Abort, now: float) -> list[fx.Effect]:
        outcomes: list[tuple[str, bool]] = []
        effects: list[fx.Effect] = []
        for named in event.request_ids:
            request_id = self._lingering.meant(named, event.others.get(named, ()))
            samples = self.queue.by_request_id(request_id)
            outcomes.append((named, bool(samples) or self._lingering.awaits_worker(request_id)))
            for request in samples:
                self._end(request, now, reason=fx.EndReason.ABORTED)
            effects += self._lingering.forget(request_id)
        return [*effects, fx.AbortReply(frontend=event.frontend, query=event.query, outcomes=tuple(outcomes))]

    def _end(
        self,
        request: Request,
        now: float,
        *,
        reason: fx.EndReason | None = None,
        failure: fx.Failure | None = None,
        stop_token_id: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Ends a live request in any phase: frees its row and pages, removes it, and adds its one terminal answer."""
        in_flight = self._remove(request, now)
        delivered = request.num_outputs
        kept = delivered if output_tokens is None else min(output_tokens, delivered)
        stats = stats_of(request, now=now, output_tokens=kept, discarded_tokens=in_flight + delivered - kept)
        end = fx.End(stream=request.stream, reason=reason, failure=failure, stop_token_id=stop_token_id, stats=stats)
        self._lingering.ended(request, end, kept, now)
        self._output.add(request.frontend, end)

    def _end_convicted(self, now: float) -> list[fx.Effect]:
        """Ends the requests that were convicted of killing their workers or making their steps fail."""
        convicted = self.convictions.take(now)
        for request, failure in convicted:
            self._end(request, now, failure=failure)
        return [fx.Note(message=f"{failure.message}; it is quarantined") for _, failure in convicted]

    def _remove(self, request: Request, now: float) -> int:
        """Removes a live request without an answer; returns its tokens that are still in flight."""
        if request.phase is Phase.RUNNING:
            self.lanes[request.worker].unseat(request, Move.END)
        else:
            request.move(Move.END)
            self.queue.withdraw(request)
        self.queue.remove(request)
        if (account := self.queue.account_of(request)) is not None:
            account.give_back(request.unmade, now)
        self._lanes.suspects.forget(request)
        self.preparations.removed(request)
        return request.pending_tokens

    def _on_tenants_changed(self, event: ev.TenantsChanged, now: float) -> list[fx.Effect]:
        self.queue.accounts.change(event.limits, now)
        self.queue.unpark_all()
        return []

    # Front ends ----------------------------------------------------------------------------------------------

    def _on_frontend_joined(self, event: ev.FrontendJoined, now: float) -> list[fx.Effect]:
        effects = self._drop_frontend(event.frontend, now)
        effects += self._changed_status(now)
        self.frontends[event.frontend] = self._next_frontend
        self._next_frontend += 1
        drain = [fx.AnnounceDrain(frontend=event.frontend)] if self.drains.is_stopping else []
        return [*effects, *self._announcer.greeting(event.frontend, now), *drain]

    def _changed_status(self, now: float) -> list[fx.Effect]:
        """Looks at the service, and tells front ends what is new."""
        self.availability.look(now, is_stopping=self.drains.is_stopping)
        return self._announcer.changed_status(self.frontends, now)

    def _drop_frontend(self, frontend: str, now: float) -> list[fx.Effect]:
        """Frees the requests of a front end that is gone, except for those that linger."""
        if self.frontends.pop(frontend, None) is None:
            return []
        effects = self._lingering.frontend_lost(frontend, now)
        for request in [request for request in self.queue if request.frontend == frontend]:
            self._remove(request, now)
        return effects

    def _on_load_query(self, event: ev.LoadQuery, now: float) -> list[fx.Effect]:
        version = "" if self.weights.current is None else self.weights.current.version
        load = load_of(self._lanes, self.queue, self._steps.step_ms, self.output_tokens, version, now)
        return [fx.LoadReply(frontend=event.frontend, query=event.query, load=load)]

    def _on_flush_cache(self, event: ev.FlushCache, now: float) -> list[fx.Effect]:
        return [fx.FlushReply(frontend=event.frontend, query=event.query, pages=flush(self._lanes))]

    # Workers -------------------------------------------------------------------------------------------------

    def _on_worker_lost(self, event: ev.WorkerLost, now: float) -> list[fx.Effect]:
        if event.worker not in self.lanes:
            return []
        is_orderly = event.is_orderly
        return self._lanes.close(event.worker, event.reason, now, is_death=not is_orderly, is_orderly=is_orderly)

    def _on_workers_changed(self, now: float) -> list[fx.Effect]:
        """Updates the waits of all requests and announces the model, after the known workers changed."""
        self._seen_revision = self._lanes.worker_infos.revision
        if self.info is not None:
            for ending in self._acceptance.restore(self._lingering.take_restored(), now):
                self._apply_ending(ending, now)
        for request in self.queue:
            self._acceptance.update_worker_wait(request, now)
        return self._announcer.changed_model(self.frontends)

    def _on_step_done(self, event: ev.StepDone, now: float) -> list[fx.Effect]:
        lane = self.lanes.get(event.worker)
        weights_version = "" if lane is None else lane.info.weights_version
        effects, delivery, endings = self._steps.read(event, self.frontends, now)
        for ending in endings:
            self._apply_ending(ending, now)
        if delivery is not None:
            self.output_tokens += len(delivery.tokens)
            effects += self._output.deliver(delivery, self.frontends, weights_version)
        return effects

    def _apply_ending(self, ending: Ending, now: float) -> None:
        if ending.failure is not None:
            self._end(ending.request, now, failure=ending.failure)
            return
        if ending.outgrew:
            self._lanes.send_on(ending.request)
            self._acceptance.update_worker_wait(ending.request, now)
            return
        ending.request.last_token_at = now
        self._end(ending.request, now, reason=ending.reason, stop_token_id=ending.stop_token_id)

    # Time ----------------------------------------------------------------------------------------------------

    def _on_tick(self, event: ev.Tick, now: float) -> list[fx.Effect]:
        effects = [*self._acceptance.expire(now), *self._lingering.expire(now)]
        self._lanes.worker_infos.expire(now)
        self.held_pools.expire(now)
        effects += faults.give_up_hung(self._lanes, self.config, now)
        effects += self._lanes.seat_due(now)
        effects += self.drains.advance(now)
        effects += self.weights.advance(now)
        if self._lanes.suspects.has_convicted:
            effects += self._end_convicted(now)
        effects += self._steps.plan(self.frontends, now)
        effects += self._changed_status(now)
        effects += self._waits.tell(self.frontends, now)
        return effects

    def _on_paused(self, event: ev.Paused, now: float) -> list[fx.Effect]:
        faults.excuse(self._lanes, event.seconds)
        return []
