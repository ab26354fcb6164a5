"""One random life of the core, drawn from a seed: everything that can happen, in any order, on a virtual clock.

Owns the clock, the order of moves and the core. After each event every invariant is audited; at the end faults stop,
and everybody must get an answer.
"""

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
from tandem.internal.v1 import worker_pb2

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import hash_pages
from scheduler_svc.core.messages.reports import StepReport
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.host_pool import HostPage
from scheduler_svc.recording.event_log import EffectsDigest
from scheduler_svc.wire import worker as worker_wire
from tests.simulation.demand import Demand
from tests.simulation.fleet import Fleet
from tests.simulation.setting import draw_setting

_FINALE_STEPS = 3000
# Nobody is admitted after a drain has begun, so it begins late.
_DRAIN_SHARE, _DRAINS_AFTER = 0.2, 0.9
# A replay costs as much as the life: of every so many seeds, one.
_REPLAY_EVERY = 5
# Stands for the owner of a row that a worker proves itself with: its page may go to no request unwritten.
_PROBATION = ev.Submit(
    frontend="",
    stream=0,
    request_id="probation",
    prompt=np.zeros(1, np.int32),
    sampling=ev.Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0),
    max_new_tokens=1,
    min_new_tokens=0,
    stop_token_ids=(),
    ignore_eos=True,
    priority=0,
    max_time_seconds=0.0,
    deadline_seconds=0.0,
    cache_write=False,
)


class Episode:
    """`run` raises AssertionError, with the seed in its notes, where anything promised does not hold."""

    def __init__(self, seed: int, *, operations: int = 1000) -> None:
        self.seed = seed
        self.operations = operations
        self.num_handled = 0
        self.seen: Counter[str] = Counter()
        """What happened how often, so that a test can tell that all of it does."""
        rng = self.rng = random.Random(seed)
        self.setting = draw_setting(rng)
        self.core = Scheduler(self.setting.config)
        self.now = 0.0
        self.demand = Demand(rng, self.setting, self.handle, self.seen)
        self.fleet = Fleet(rng, self.setting, self.handle, self.seen)
        self.log: list[tuple[float, ev.Event]] = []
        self.digest = EffectsDigest()
        self._num_hashed: dict[int, int] = {}
        self._host_pages: dict[str, dict[bytes, HostPage]] = {}
        self._replays = seed % _REPLAY_EVERY == 0
        self._status: dict[str, fx.CoreStatus] = {}

    def run(self) -> None:
        """The whole life; then, for some seeds, the check that the same events give the same effects."""
        try:
            self.demand.frontend_joins()
            self.fleet.come()
            moves, weights = zip(*self._moves(), strict=True)
            drains_at = self.operations * (_DRAINS_AFTER if self.rng.random() < _DRAIN_SHARE else 2)
            while self.num_handled < self.operations:
                self.rng.choices(moves, weights)[0]()
                if self.num_handled > drains_at and not self.core.draining:
                    self.demand.drain()
            self._finale()
            if self._replays:
                self._check_replay()
        except Exception as error:
            again = f"python -m tests.simulation {self.seed} --operations {self.operations}"
            error.add_note(f"seed {self.seed}, operation {self.num_handled} of {self.operations}; again: {again}")
            raise

    def _moves(self) -> list[tuple[Callable[[], None], float]]:
        demand, fleet = self.demand, self.fleet
        return [
            (lambda: demand.submit(self.now), 14), (demand.end_from_outside, 4),
            (fleet.work, 18), (fleet.hear, 18), (self._tick, 24), (self._progress, 13), (fleet.heartbeats, 2),
            (fleet.rejoin, 1.5), (fleet.come, 1.2), (fleet.die, 0.5), (fleet.join_twice, 0.2),
            (fleet.haunt, 0.5), (fleet.come_as_another, 0.1), (self._long_silence, 0.2),
            (demand.frontend_joins, 0.4), (demand.frontend_dies, 0.2), (demand.frontend_starts_anew, 0.05),
            (demand.ask_load, 0.5), (self._flush, self.setting.flush_share),
        ]  # fmt: skip

    # Events and effects ------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Hands the event in, audits, and carries the effects out."""
        self.num_handled += 1
        effects = self.core.handle(event, self.now)
        if self._replays:
            self.log.append((self.now, event))
            self.digest.add(effects)
        audit(self.core)
        self._check_hashes()
        for effect in effects:
            self._carry_out(effect)
        self._check_host_pages(effects)
        if isinstance(event, ev.Tick):
            self._check_busy()
            self._check_status()
        return effects

    def _check_status(self) -> None:
        """Front ends know whether the queue is full, for they refuse requests by that alone."""
        queue, config = self.core.queue, self.setting.config
        is_full = queue.num_waiting >= config.max_waiting or queue.waiting_tokens >= config.max_waiting_tokens
        for frontend in self.core.frontends:
            assert bool(self._status[frontend].queue_full) == is_full, f"{frontend} does not know the queue's state"
            assert self._status[frontend].workers == len(self.core.lanes)
            self.seen["queue full"] += is_full

    def _check_size(self, sent: fx.SendPlan) -> None:
        """A plan starts one row, or as many as its size allows."""
        frame = worker_pb2.CoreToWorker.FromString(worker_wire.plan_frame(sent.plan))
        size, limit = frame.plan.started.ByteSize(), self.setting.config.max_plan_bytes
        assert len(sent.plan.starts) < 2 or size <= limit, f"{len(sent.plan.starts)} rows start in {size} bytes"

    def _check_hashes(self) -> None:
        """The names of a request's pages are a chain from its tenant's root; each is looked at when it is new."""
        page_size = self.setting.shape.page_size
        for request in self.core.queue:
            count = len(request.page_hashes)
            if count == self._num_hashed.get(request.handle, 0):
                continue
            self._num_hashed[request.handle] = count
            known = self.core.lanes[request.worker].rows if request.row else None
            end = count * page_size
            tokens = known.tokens_between(request.row, 0, end) if known else request.tokens_between(0, end)
            assert b"".join(request.page_hashes) == hash_pages(request.prefix_root, tokens, page_size), (
                f"{request.request_id}: its pages are named by another past or another tenant's root"
            )

    def _check_host_pages(self, effects: list[fx.Effect]) -> None:
        """What counts as saved, a plan has saved: the index of a worker's host memory changes with its plans."""
        for worker, lane in self.core.lanes.items():
            if not lane.host.num_slots:
                continue
            plans = [effect.plan for effect in effects if isinstance(effect, fx.SendPlan) and effect.worker == worker]
            saved = {slot for plan in plans for slot in plan.moves.saved_slots.tolist()}
            before, kept = self._host_pages.get(worker, {}), dict(lane.host._pages)
            new = {page.slot for page_hash, page in kept.items() if before.get(page_hash) is not page}
            assert new <= saved, f"{worker}: host pages {new - saved} count as saved, and no plan saves them"
            self._host_pages[worker] = kept

    def _check_busy(self) -> None:
        lanes = self.core.lanes.values()
        self.seen["several lanes at work"] += sum(bool(lane.in_flight) for lane in lanes) > 1
        if lanes and not any(lane.in_flight for lane in lanes):
            waiting = self.core.queue.waiting()
            assert not any(lane.info.holds(request.total_length) for request in waiting for lane in lanes), (
                "requests wait that a worker could run, and nothing was planned"
            )

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan() | fx.WorkerAccepted() | fx.WorkerRefused() | fx.AskRejoin():
                self.fleet.take(effect, self._submit_at)
                if isinstance(effect, fx.SendPlan):
                    self._check_size(effect)
            case fx.CoreStatus():
                self._status[effect.frontend] = effect
            case fx.WorkerProven():
                self.seen["worker proven"] += 1
            case fx.Admitted() | fx.Rejected() | fx.StepOutput():
                self.demand.take(effect, self.now)
            case StepReport() if effect.cause is not None:
                self.seen[f"reset: {effect.cause}"] += 1
            case _:
                pass

    def _submit_at(self, sent: fx.SendPlan, row: int) -> ev.Submit:
        """Whose row of a plan that was just made it is."""
        [record] = [record for record in self.core.lanes[sent.worker].in_flight if record.step == sent.plan.step]
        handle = int(record.handles[record.rows == row][0])
        if handle < 0:
            return _PROBATION
        request = self.core.queue.by_handle(handle)
        assert request is not None
        return self.demand.callers.by_key[request.frontend, request.stream].submit

    def _flush(self) -> None:
        self.demand.flush()
        for lane in self.core.lanes.values():
            assert lane.pool.num_cached == lane.host.num_used == 0, "flushed, and something is kept"

    # Time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.now += self.rng.choice([0.0, 0.001, 0.01, 0.1])
        self.handle(ev.Tick())

    def _long_silence(self) -> None:
        self.now += self.rng.choice([1.0, 4.0, 6.0])
        self.handle(ev.Tick())

    def _progress(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.now += 0.001
            self.handle(ev.Tick())
            self.fleet.step_all()

    def _finale(self) -> None:
        """Lies and losses stop; what lives must end, and nothing may be held."""
        core, fleet = self.core, self.fleet
        if self.rng.random() < 0.1:
            self.handle(ev.DrainEnded())
        fleet.come_in_full_size()
        idle = 0
        for _ in range(_FINALE_STEPS):
            if not len(core.queue):
                break
            self.now += 0.0005
            self.handle(ev.Tick())
            fleet.rejoin()
            if not fleet.workers:
                fleet.come_in_full_size()
            idle = 0 if fleet.step_all() else idle + 1
            if idle > 2:
                # A result was lost; only patience helps.
                self.now += 2 * self.setting.config.step_timeout_seconds
        assert not len(core.queue), f"{len(core.queue)} requests live after {_FINALE_STEPS} steps"
        self.demand.callers.check_answered()
        assert not core.suspects
        for lane in core.lanes.values():
            assert (lane.pool.num_used, lane.rows.num_seated) == (0, 0), "nobody lives, and something is held"

    def _check_replay(self) -> None:
        again, digest = Scheduler(self.setting.config), EffectsDigest()
        for now, event in self.log:
            digest.add(again.handle(event, now))
        assert digest.value() == self.digest.value(), "the same events gave other effects"
