"""One random run of the core, drawn from a seed: every kind of event, in random order, on a virtual clock.

Owns the clock, the order of moves and the core. Every invariant is audited after each event. At the end faults stop,
and every request must be answered.
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from tandem.internal.v1 import worker_pb2

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.lanes import PATIENCE_SECONDS
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import TenantsChanged
from scheduler_svc.core.messages.page_hash import hash_pages
from scheduler_svc.core.messages.reports import DrainReport, StepReport, WeightsReport
from scheduler_svc.core.pages.host_pool import HostPage
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.lane import holds, may_sample
from scheduler_svc.core.state.lane_phase import LanePhase
from scheduler_svc.core.state.request import Phase, Request
from scheduler_svc.core.waits import LOOK_SECONDS
from scheduler_svc.recording.event_log import EffectsDigest
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.core_events import submit
from tests.rigs.session_log import SessionLog
from tests.simulation.death_log import DeathLog
from tests.simulation.fleet import Fleet, WorkerEffect
from tests.simulation.listing import Lister
from tests.simulation.load import Load
from tests.simulation.setting import Setting, draw_limits, draw_setting

_FINALE_STEPS = 3000
# The core admits nothing once a drain has begun, so it begins late.
_DRAIN_SHARE, _DRAINS_AFTER = 0.2, 0.9
# A replay costs as much as the run, so only every fifth seed is replayed.
_REPLAY_EVERY = 5
# Stands for the owner of a row in a worker's probation step; no request may get its page before the page is rewritten.
_PROBATION = submit(0, [0], frontend="", request_id="probation", max_new_tokens=1, cache_write=False)


class Episode:
    """`run` raises AssertionError, with the seed in its notes, if a check fails."""

    def __init__(
        self,
        seed: int,
        *,
        operations: int = 1000,
        updates: bool = False,
        setting: Setting | None = None,
        session: SessionLog | None = None,
    ) -> None:
        """`updates`: workers load new weights, too; that empties all caches, so most episodes go without.

        `setting` is drawn from the seed by default. `session` gets the events and effects.
        """
        self.seed, self.updates = seed, updates
        self.operations = operations
        self.num_handled = 0
        self.seen: Counter[str] = Counter()
        """How often each kind of event occurred, so that a test can assert that all of them do."""
        rng = self.rng = random.Random(seed)
        self.setting = setting or draw_setting(rng)
        self.core = Scheduler(self.setting.config)
        self._session = session
        if session is not None:
            session.begin(self.setting.config)
        self.now = 0.0
        self.load = Load(rng, self.setting, self.handle, self.seen)
        self.lister = Lister(seed, self.core, self.load.callers, self.load.lingering, self.seen)
        self._deaths = DeathLog(self.core, self.load.callers.by_key)
        self.fleet = Fleet(rng, self.setting, self.handle, self.seen)
        self.log: list[tuple[float, ev.Event]] = []
        self.digest = EffectsDigest()
        self._num_hashed: dict[int, int] = {}
        self._host_pages: dict[str, dict[bytes, HostPage]] = {}
        self._replays = seed % _REPLAY_EVERY == 0
        self._status: dict[str, fx.CoreStatus] = {}
        self._told_at: dict[tuple[str, int], float] = {}

    def run(self) -> None:
        """Runs the whole episode, and for some seeds replays its events and compares the effects."""
        try:
            self.load.frontend_joins()
            self.fleet.worker_joins()
            moves, weights = zip(*self._moves(), strict=True)
            drains_at = self.operations * (_DRAINS_AFTER if self.rng.random() < _DRAIN_SHARE else 2)
            while self.num_handled < self.operations:
                self.rng.choices(moves, weights)[0]()
                if self.num_handled > drains_at and not self.core.is_stopping:
                    self.load.drain()
            self._finale()
            if self._replays:
                self._check_replay()
        except Exception as error:
            command = f"python -m tests.simulation {self.seed} --operations {self.operations}"
            error.add_note(f"seed {self.seed}, operation {self.num_handled} of {self.operations}; replay: {command}")
            raise

    def _moves(self) -> list[tuple[Callable[[], None], float]]:
        load, fleet = self.load, self.fleet
        return [
            (lambda: load.submit(self.now), 14), (load.end_from_outside, 4),
            (fleet.execute_plans, 18), (fleet.deliver_results, 18), (self._tick, 24), (self._progress, 13),
            (fleet.standby_worker_joins, 0.4),
            (fleet.resources_ready, 8),
            (fleet.heartbeats, 2), (fleet.rejoin, 1.5), (fleet.worker_joins, 1.2), (fleet.worker_dies, 0.5),
            (fleet.join_twice, 0.2), (fleet.late_result_arrives, 0.5), (fleet.other_model_joins, 0.1),
            (self._long_silence, 0.2), (self._pause, 0.2), (fleet.worker_hangs, 1.0), (fleet.workers_wake, 0.2),
            (lambda: fleet.drain(list(self.core.frontends)), 0.3), (fleet.dismissed_leave, 3.0),
            (load.frontend_joins, 0.4), (load.frontend_dies, 0.2),
            (load.frontend_restarts, 0.05), (load.query_load, 0.5),
            (load.lingering.connection_breaks, 0.8), (load.caller_returns, 0.8),
            *([(lambda: fleet.update_weights(list(self.core.frontends)), 0.8)] if self.updates else []),
            (self._flush, self.setting.flush_share),
            (self._tenants_change, 0.5 if any(self.setting.tenants) else 0),
        ]  # fmt: skip

    # Events and effects ------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Passes the event to the core, audits the core, and delivers the effects."""
        self.num_handled += 1
        self._deaths.before(event)
        outgrown = self._outgrown(event)
        effects = self.core.handle(event, self.now)
        self.seen["worker outgrown"] += sum(one.phase is Phase.WAITING and one.known == room for one, room in outgrown)
        self._deaths.after(event)
        if self._replays:
            self.log.append((self.now, event))
            self.digest.add(effects)
        if self._session is not None:
            self._session.add(self.now, event, effects)
        audit(self.core)
        self._check_hashes()
        for effect in effects:
            self._carry_out(effect)
        self.load.lingering.settle()
        self._check_host_pages(effects)
        if isinstance(event, ev.Tick):
            self._check_busy()
            self._check_status()
            self.lister.look(self.now)
        return effects

    def _outgrown(self, event: ev.Event) -> list[tuple[Request, int]]:
        """The requests that may get the last token for which the worker of a result has room, and that room."""
        lane = self.core.lanes.get(event.worker) if isinstance(event, ev.StepDone) else None
        if lane is None:
            return []
        room = lane.info.longest_sequence
        seated = lane.rows.requests_at(lane.rows.seated())
        return [(one, room) for one in seated if lane.rows.known[one.row] == room - 1]

    def _check_status(self) -> None:
        """Asserts that front ends know whether the queue is full, because they refuse requests on that flag alone."""
        queue, config = self.core.queue, self.setting.config
        is_full = queue.num_waiting >= config.max_waiting or queue.waiting_tokens >= config.max_waiting_tokens
        # Each of several tenants has places of its own.
        is_full &= not queue.accounts.is_shared
        for frontend in self.core.frontends:
            status = self._status[frontend]
            assert bool(status.queue_full) == is_full, f"{frontend} has a wrong queue_full"
            assert status.places <= (0 if is_full else config.max_waiting), f"{frontend} counts to {status.places}"
            self.seen["queue full"] += is_full
            self._check_health(self._status[frontend])

    def _check_health(self, status: fx.CoreStatus) -> None:
        """Asserts that front ends say that the service serves exactly while a worker may start a new request."""
        core = self.core
        takers = [lane for lane in core.lanes.values() if lane.phases.may_start]
        assert status.workers == len(takers)
        is_refused = status.refuses or core.is_stopping
        assert (status.not_serving == "") == (bool(takers) and not is_refused), status.not_serving
        assert (status.reason is None) == (status.not_serving == "")
        if status.reason is not None:
            self.seen[f"not serving: {status.reason}"] += 1

    def _check_waits(self, effect: fx.Waits) -> None:
        """Asserts that only callers of live requests get a report, and at most once a second."""
        for wait in effect.waits:
            for stream in wait.streams:
                key = effect.frontend, stream
                assert key in self.load.callers.by_key, "a stream that nobody reads is told to wait"
                told_at = self._told_at.get(key, float("-inf"))
                assert self.now - told_at >= LOOK_SECONDS, f"told again after {self.now - told_at} s"
                self._told_at[key] = self.now
                self.seen[f"waits: {wait.reason}"] += 1

    def _check_size(self, sent: fx.SendPlan) -> None:
        """Asserts that a plan starts one row, or as many as its size limit allows."""
        frame = worker_pb2.CoreToWorker.FromString(worker_wire.plan_frame(sent.plan))
        size, limit = frame.plan.started.ByteSize(), self.setting.config.max_plan_bytes
        assert len(sent.plan.starts) < 2 or size <= limit, f"{len(sent.plan.starts)} rows start in {size} bytes"

    def _check_hashes(self) -> None:
        """Asserts that a request's new page hashes continue the chain from its tenant's root."""
        page_size = self.setting.shape.page_size
        for request in self.core.queue:
            count = len(request.page_hashes)
            if count == self._num_hashed.get(request.handle, 0):
                continue
            self._num_hashed[request.handle] = count
            known = self.core.lanes[request.worker].rows if request.row else None
            end = count * page_size
            tokens = known.tokens_between(request.row, 0, end) if known else request.tokens_between(0, end)
            assert b"".join(request.page_hashes) == hash_pages(request.submit.prefix_root, tokens, page_size), (
                f"{request.submit.request_id}: its page hashes belong to other tokens or another tenant's root"
            )

    def _check_host_pages(self, effects: list[fx.Effect]) -> None:
        """Asserts that a plan has saved each host page that the index of host memory lists."""
        for worker, lane in self.core.lanes.items():
            if not lane.host.num_slots:
                continue
            plans = [effect.plan for effect in effects if isinstance(effect, fx.SendPlan) and effect.worker == worker]
            saved = {slot for plan in plans for slot in plan.moves.saved_slots.tolist()}
            before, kept = self._host_pages.get(worker, {}), dict(lane.host._pages)
            new = {page.slot for page_hash, page in kept.items() if before.get(page_hash) is not page}
            assert new <= saved, f"{worker}: host pages {new - saved} are listed as saved, but no plan saves them"
            self._host_pages[worker] = kept

    def _check_busy(self) -> None:
        """Asserts that a lane has a step in flight if a waiting request fits any worker."""
        lanes = [lane for lane in self.core.lanes.values() if lane.phases.counts]
        self._check_seats(bool(lanes))
        self.seen["several lanes at work"] += sum(bool(lane.in_flight) for lane in lanes) > 1
        if lanes and not any(lane.in_flight for lane in lanes):
            tenants = self.core.queue.tenants
            may_start = [lane for lane in lanes if lane.phases.may_start]
            # Rows that must not sample yet may have all rows or pages.
            self.seen["row awaits a resource"] += sum(lane.rows.num_awaiting for lane in may_start)
            may_start = [lane for lane in may_start if not lane.rows.num_awaiting]
            # A tenant may have all its rows on a worker with an order to leave, or to load weights.
            is_drained = not all(lane.phases.stays for lane in self.core.lanes.values())
            stops = is_drained or any(not lane.phases.may_plan for lane in lanes)
            # Or in rows that must not sample yet.
            seated = [one for lane in lanes for one in lane.rows.requests_at(lane.rows.seated())]
            preparing = {one.submit.tenant for one in seated if self.core.lanes[one.worker].rows.awaits_needs[one.row]}
            waiting = [
                one
                for one in self.core.queue.waiting()
                if not (tenants[one.submit.tenant].is_parked and (stops or one.submit.tenant in preparing))
            ]
            suspects, pausing = self.core.suspects, {lane.worker for lane in lanes if not lane.phases.may_plan}
            trial_on = suspects.trial.worker if suspects.trial is not None and suspects.is_running() else ""
            if trial_on in pausing or any(one.needs for one in suspects.members()):
                # A trial may wait for what it needs or for its lane to load, and the next trials for it.
                waiting = [one for one in waiting if not self.core.queue.is_held(one)]
            assert not any(
                holds(lane, request) and may_sample(lane, request) for request in waiting for lane in may_start
            ), "requests that fit a worker wait, and no step was planned"

    def _check_seats(self, any_seated: bool) -> None:
        """Asserts that a proven standby worker is seated in time if no other worker is there."""
        waiting = [
            lane.proven_at
            for lane in self.core.lanes.values()
            if lane.phases.seat is LanePhase.STANDBY and lane.phases.stays
        ]
        if waiting and not any_seated:
            assert self.now < min(waiting) + PATIENCE_SECONDS, "nobody serves, and a standby worker waits"

    def _carry_out(self, effect: fx.Effect) -> None:
        if isinstance(effect, WorkerEffect):
            self.fleet.take(effect, self._submit_at)
        match effect:
            case fx.SendPlan():
                self._check_size(effect)
            case fx.Waits():
                self._check_waits(effect)
            case fx.CoreStatus():
                self._status[effect.frontend] = effect
            case fx.WorkerProven():
                self.seen["standby seated" if effect.was_standby else "worker proven"] += 1
            case fx.Admitted() | fx.Rejected() | fx.StepOutput():
                self._check_spans(effect)
                self.load.take(effect, self.now)
            case fx.Detached() | fx.Forgotten() | fx.Resumed() | fx.Replaced():
                self.load.lingering.take(effect)
            case WeightsReport():
                self.seen[f"update: {effect.state}"] += 1
            case DrainReport():
                self.seen[f"drain: {effect.state}"] += 1
                self.seen["request moved"] += effect.moved
            case StepReport() if effect.cause is not None:
                self.seen[f"reset: {effect.cause}"] += 1
            case _:
                pass

    def _check_spans(self, effect: fx.Effect) -> None:
        """Asserts that the spans of an ended output are those of other versions, in order, from its beginning."""
        for end in effect.ends if isinstance(effect, fx.StepOutput) else ():
            spans = end.stats.weights
            starts = [span.from_token for span in spans]
            assert starts == sorted(set(starts)) and (not spans or starts[0] == 0)
            assert all(one.version != other.version for one, other in pairwise(spans))
            self.seen["output of several versions"] += len(spans) > 1

    def _submit_at(self, sent: fx.SendPlan, row: int) -> ev.Submit:
        """The request that owns this row of a plan that was just made."""
        [record] = [record for record in self.core.lanes[sent.worker].in_flight if record.step == sent.plan.step]
        handle = int(record.handles[record.rows == row][0])
        if handle < 0:
            return _PROBATION
        request = self.core.queue.by_handle(handle)
        assert request is not None
        return self.load.callers.by_key[request.frontend, request.stream].submit

    def _flush(self) -> None:
        self.load.flush()
        for lane in self.core.lanes.values():
            assert lane.pool.num_cached == lane.host.num_used == 0, "pages remain cached after a flush"

    def _tenants_change(self) -> None:
        self.handle(TenantsChanged(limits=draw_limits(self.rng, self.setting)))
        self.seen["token file"] += 1

    # Time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.now += self.rng.choice([0.0, 0.001, 0.01, 0.1])
        self.handle(ev.Tick())

    def _long_silence(self) -> None:
        self.now += self.rng.choice([1.0, 4.0, 6.0])
        self.handle(ev.Tick())

    def _pause(self) -> None:
        """The scheduler does not run for a while; no worker may be given up for that."""
        seconds = self.rng.choice([1.0, 5.0, 50.0])
        before = {worker: lane.timeout(self.setting.config) for worker, lane in self.core.lanes.items()}
        self.now += seconds
        self.handle(ev.Paused(seconds=seconds))
        after = {worker: lane.timeout(self.setting.config) for worker, lane in self.core.lanes.items()}
        assert after == pytest.approx({worker: at + seconds for worker, at in before.items()})

    def _progress(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.now += 0.001
            self.handle(ev.Tick())
            self.fleet.step_all()

    def _finale(self) -> None:
        """Stops all faults and runs until every request has ended; asserts that no page and no row is held then."""
        core, fleet = self.core, self.fleet
        fleet.workers_wake()
        fleet.workers_load()
        if self.rng.random() < 0.1:
            self.handle(ev.DrainEnded())
        fleet.full_size_worker_joins()
        idle = 0
        for _ in range(_FINALE_STEPS):
            if not len(core.queue):
                break
            self.now += 0.0005
            self.handle(ev.Tick())
            fleet.rejoin()
            if not fleet.workers:
                fleet.full_size_worker_joins()
            idle = 0 if fleet.step_all() else idle + 1
            if idle > 2:
                # A result was lost, so the step must time out.
                self.now += 2 * self.setting.config.step_timeout_seconds
        assert not len(core.queue), f"{len(core.queue)} requests have not ended after {_FINALE_STEPS} steps"
        self.load.callers.check_answered()
        self.seen.update({f"memory: {what}": count for what, count in core.counters.memory_reductions.items()})
        assert not core.suspects
        for lane in core.lanes.values():
            assert (lane.pool.num_used, lane.rows.num_seated) == (0, 0), "pages or rows are held without a request"

    def _check_replay(self) -> None:
        """Asserts that the same events give the same effects."""
        replayed, digest = Scheduler(self.setting.config), EffectsDigest()
        for now, event in self.log:
            digest.add(replayed.handle(event, now))
        assert digest.value() == self.digest.value(), "the same events gave other effects"
