"""The workers' side of an episode: joins, deaths, plans and results in transit, and faults.

Owns the workers and the messages between them and the core. Knows nothing of callers.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Running
from scheduler_svc.core.messages.plan import Plan, TakeOver
from scheduler_svc.core.messages.resources import CONSTRAINT, takes
from scheduler_svc.wire.worker import frame_of
from tests.rigs.core_events import update_weights
from tests.rigs.executor import Shape
from tests.rigs.page_pool import Slots
from tests.simulation.faults import corrupt
from tests.simulation.setting import Setting, draw_faults, draw_worker_shape
from tests.simulation.worker import Joined, Worker

# Share of workers that refuse an update of weights.
_REFUSAL_SHARE = 0.1
# Share of the smaller workers that take no adapters, where adapters are known.
_WITHOUT_ADAPTERS_SHARE = 0.3
Handle = Callable[[ev.Event], list[fx.Effect]]
# Share of lost workers with a shared pool that is gone when another worker wants it.
_LOST_POOL_SHARE = 0.1
# Share of lost workers that share their pool and are started again at once.
_RESTART_SHARE = 0.7
SubmitAt = Callable[[fx.SendPlan, int], ev.Submit]
WorkerEffect = (
    fx.SendPlan | fx.WorkerAccepted | fx.WorkerProven | fx.WorkerRefused | fx.AskRejoin | fx.KillWorker
    | fx.DismissWorker | fx.LoadWeights | fx.PrepareResource | fx.DropResource
)  # fmt: skip


class Fleet:
    """Each public method without a result is a move. A move that is impossible at the moment does nothing."""

    def __init__(self, rng: random.Random, setting: Setting, handle: Handle, seen: Counter[str]) -> None:
        self.workers: dict[str, Worker] = {}
        self._rng = rng
        self._setting = setting
        self._handle = handle
        self._seen = seen
        self._num_workers = self._num_drains = self._num_updates = 0
        # The worker that died last, with its undelivered results.
        self._dead: Worker | None = None
        # By pool id: the memory of dead workers' pools, and the requests that the core has written their pages for,
        # with the first generation of each session that used the pool or had an order to use it.
        self._shared: dict[bytes, Slots] = {}
        self._writers: defaultdict[bytes, list[tuple[int, dict[int, ev.Submit]]]] = defaultdict(list)

    # Joining and leaving -------------------------------------------------------------------------------------------

    def worker_joins(self) -> None:
        """A new worker of random size joins, up to `max_workers`."""
        if len(self.workers) < self._setting.max_workers:
            self._add(draw_worker_shape(self._rng, self._setting))

    def standby_worker_joins(self) -> None:
        """A worker on standby joins, at most one more than `max_workers` allows."""
        if len(self.workers) <= self._setting.max_workers:
            self._add(draw_worker_shape(self._rng, self._setting), is_standby=True)

    def _add(self, shape: Shape, *, is_standby: bool = False) -> None:
        self._num_workers += 1
        name = f"w-{self._num_workers}"
        faults = draw_faults(self._rng, self._setting)
        pool_id = name.encode() if self._setting.shares_pools else b""
        self.workers[name] = worker = Worker(
            name=name, shape=shape, faults=faults, is_standby=is_standby, pool_id=pool_id, shared=self._shared
        )
        if self._rng.random() < self._setting.without_constraints_share and shape != self._setting.shape:
            worker.constraint_refusal = "this worker takes no constraints"
        if random.Random(f"adapters of {name}").random() < _WITHOUT_ADAPTERS_SHARE and shape != self._setting.shape:
            worker.adapter_refusal = "this worker takes no adapters"
        self._join(worker)

    def full_size_worker_joins(self) -> None:
        """A worker that fits every admitted request joins; if `max_workers` serve, it replaces one of them."""
        if len(self.workers) >= self._setting.max_workers:
            self.worker_dies()
        self._add(self._setting.shape)

    def other_model_joins(self) -> None:
        """A worker of another model joins; the core must refuse it without a retry."""
        info = replace(next(iter(self.workers.values())).info, identity="another") if self.workers else None
        if info is None:
            return
        effects = self._handle(ev.WorkerJoined(worker="stranger", info=info))
        if any(isinstance(effect, fx.WorkerAccepted) for effect in effects):
            # No worker has passed probation yet, so the core may choose either model.
            self._handle(ev.WorkerLost(worker="stranger", reason="killed"))
            return
        assert [effect.retry for effect in effects if isinstance(effect, fx.WorkerRefused)] == [False]

    def _join(self, worker: Worker) -> None:
        worker.wants_to_join = False
        self._handle(worker.joining())

    def join_twice(self) -> None:
        """A worker that serves sends its Join again."""
        if self.workers:
            self._join(self._any())

    def rejoin(self) -> None:
        """Workers that were asked to rejoin, or refused for now, join again."""
        for worker in list(self.workers.values()):
            if worker.wants_to_join and not worker.is_hung and self._rng.random() < 0.7:
                self._join(worker)

    def worker_dies(self) -> None:
        """A worker dies with its results undelivered."""
        if self.workers:
            self._die(self._any())

    def _die(self, worker: Worker) -> None:
        self._dead = self.workers.pop(worker.name)
        if self._setting.shares_pools:
            self._leave_pool(self._dead)
        self._handle(ev.WorkerLost(worker=self._dead.name, reason="killed"))
        if self._setting.shares_pools and self._rng.random() < _RESTART_SHARE:
            self._add(self._dead.shape)

    def _leave_pool(self, worker: Worker) -> None:
        """The worker dies before or after further steps with results that are lost; sometimes its pool is lost, too."""
        for _ in range(self._rng.randint(0, 2)):
            worker.work()
        if self._rng.random() >= _LOST_POOL_SHARE:
            self._shared[worker.executor.pool_id] = worker.executor.memory

    def drain(self, frontends: list[str]) -> None:
        """An operator drains a worker."""
        if self.workers:
            self._num_drains += 1
            self._handle(
                ev.Drain(
                    frontend=self._rng.choice([*frontends, "gone"]),
                    query=self._num_drains,
                    worker=self._any().name,
                    max_seconds=self._rng.choice([0.0, 0.0, 0.05, 5.0]),
                    force=self._rng.random() < 0.3,
                )
            )

    def update_weights(self, frontends: list[str]) -> None:
        """An operator lets all workers load new weights, and some refuse."""
        self._num_updates += 1
        for worker in self.workers.values():
            worker.refusal = "no space" if self._rng.random() < _REFUSAL_SHARE else ""
        self._handle(
            update_weights(
                self._num_updates,
                frontend=self._rng.choice([*frontends, "gone"]),
                # With ABORT, streams would end without an abort by a caller.
                running=self._rng.choice([Running.FINISH, Running.RECOMPUTE, Running.CONTINUE]),
                in_turn=self._rng.random() < 0.5,
                max_seconds=self._rng.choice([600.0, 5.0, 0.05]),
            )
        )

    def workers_load(self) -> None:
        """From now on no worker refuses weights."""
        for worker in self.workers.values():
            worker.refusal = ""

    def dismissed_leave(self) -> None:
        """Workers that were drained end in order. Another one is started in place of some."""
        for worker in [worker for worker in self.workers.values() if worker.is_dismissed and not worker.is_hung]:
            self._seen["worker left"] += 1
            del self.workers[worker.name]
            if self._setting.shares_pools:
                self._leave_pool(worker)
            self._handle(ev.WorkerLost(worker=worker.name, reason="it stops", is_orderly=True))
            if self._rng.random() < _RESTART_SHARE:
                self._add(worker.shape)

    def late_result_arrives(self) -> None:
        """A result of the worker that died last arrives."""
        if self._dead is not None and self._dead.results:
            self._handle(self._dead.event_of(self._dead.results.popleft()))

    def worker_hangs(self) -> None:
        """A worker hangs, in some settings."""
        if self.workers and self._rng.random() < self._setting.hang_share:
            self._any().is_hung = True
            self._seen["worker hangs"] += 1

    def workers_wake(self) -> None:
        """All workers that hang go on, as after SIGCONT."""
        for worker in self.workers.values():
            worker.is_hung = False

    def heartbeats(self) -> None:
        """Most workers send a heartbeat."""
        for worker in list(self.workers.values()):
            if not worker.is_hung and self._rng.random() < 0.8:
                self._beat(worker)

    def _beat(self, worker: Worker) -> None:
        for effect in self._handle(worker.alive()):
            self._seen["lost frame noticed"] += isinstance(effect, fx.Note) and "was lost: " in effect.message

    def _any(self) -> Worker:
        return self._rng.choice(list(self.workers.values()))

    # Steps -------------------------------------------------------------------------------------------------------

    def execute_plans(self) -> None:
        """One worker executes a few plans."""
        if self.workers:
            worker = self._any()
            for _ in range(self._rng.randint(1, 4)):
                worker.work()
            self._bury_poisoned()

    def _bury_poisoned(self) -> None:
        """Workers that a plan has killed die, with some of their earlier results undelivered."""
        for worker in [worker for worker in self.workers.values() if worker.is_poisoned]:
            self._seen["worker poisoned"] += 1
            while worker.results and self._rng.random() < 0.7:
                self._deliver(worker, corrupt_share=0.0)
            self._die(worker)

    def deliver_results(self) -> None:
        """The core receives a few results of one worker, some of them lost, repeated or corrupt."""
        if self.workers:
            worker = self._any()
            for _ in range(self._rng.randint(1, 3)):
                self._deliver(worker, corrupt_share=self._setting.corrupt_share)

    def resources_ready(self) -> None:
        """One worker answers one of the orders to prepare a resource, in any order."""
        if self.workers:
            self._answer_order(self._any())

    def _answer_order(self, worker: Worker) -> bool:
        if worker.is_hung or worker.is_poisoned or not worker.preparing:
            return False
        idx = self._rng.randrange(len(worker.preparing))
        self._seen[f"{worker.preparing[idx].kind or CONSTRAINT} answered"] += 1
        self._handle(worker.constraint_ready(idx))
        return True

    def step_all(self) -> bool:
        """Each worker handles one message, the core receives one result of each. Returns False if nothing was left."""
        self.dismissed_leave()
        busy = [
            worker.work() | self._deliver(worker, corrupt_share=0.0) | self._answer_order(worker)
            for worker in list(self.workers.values())
        ]
        self._bury_poisoned()
        return any(busy)

    def _deliver(self, worker: Worker, *, corrupt_share: float) -> bool:
        if worker.is_hung or not (worker.results or worker.answers):
            return False
        if not worker.results:
            self._seen["weights loaded" if worker.answers[0].ok else "weights refused"] += 1
            self._handle(worker.answer())
            return True
        result = worker.results.popleft()
        worker.done = result.generation, result.step
        if self._rng.random() < corrupt_share:
            match self._rng.choice(["lost", "twice", "corrupt"]):
                case "lost":
                    if self._rng.random() < 0.5:
                        self._beat(worker)
                    return True
                case "twice":
                    worker.results.appendleft(result)
                case _:
                    corrupt(self._rng, result, vocab_size=worker.shape.vocab_size)
        self._handle(worker.event_of(result))
        return True

    # Effects -----------------------------------------------------------------------------------------------------

    def take(
        self,
        effect: WorkerEffect,
        submit_at: SubmitAt,
    ) -> None:
        """Delivers a message of the core to its worker. `submit_at` returns the owner of a row of a plan."""
        worker = self.workers.get(effect.worker)
        if worker is None:
            # Only refusals may go to dead or unknown workers.
            assert isinstance(effect, fx.WorkerRefused | fx.AskRejoin | fx.DismissWorker) or effect.worker == "stranger"
            return
        match effect:
            case fx.WorkerProven():
                assert worker.is_standby == effect.was_standby
                worker.is_standby = False
            case fx.SendPlan():
                assert not worker.is_standby or effect.plan.step == 1, "a worker on standby gets a request"
                worker.inbox.append(effect.plan)
                for start in effect.plan.starts:
                    needs = [one.need for one in submit_at(effect, start.row).resources]
                    assert start.other_needs == tuple(need for need in needs if need.kind != CONSTRAINT)
                    assert takes(worker.info, needs), f"{worker.name} starts a row that needs what it refuses"
                    self._seen["started with an adapter"] += bool(start.other_needs)
                if effect.plan.take_over is not None:
                    self._take_over(worker, effect.plan, effect.plan.take_over)
                worker.provenance.follow(effect.plan, lambda row: submit_at(effect, row), self._seen)
            case fx.WorkerAccepted():
                kept = worker.executor.labels.by_page if effect.keeps_pages else {}
                worker.provenance.keep({page: page_hash for page, (page_hash, _) in kept.items()})
                self._seen["pages kept"] += len(kept)
                worker.joined_with, worker.done = worker.executor.pool_id, (0, 0)
                self._writers[worker.joined_with].append((effect.generation, worker.provenance.writers))
                worker.inbox.append(Joined(effect=effect))
            case fx.PrepareResource() | fx.DropResource():
                self._seen[f"{effect.kind} dropped"] += isinstance(effect, fx.DropResource)
                worker.inbox.append(effect)
            case fx.LoadWeights():
                worker.inbox.append(pb.CoreToWorker.FromString(frame_of(effect)).load_weights)
            case fx.WorkerRefused():
                assert effect.retry
                worker.wants_to_join = True
            case fx.DismissWorker():
                worker.is_dismissed = True
            case fx.KillWorker():
                # The service has started some workers, but not the others.
                if self._rng.random() < 0.5:
                    self._seen["worker killed"] += 1
                    self._dead = self.workers.pop(worker.name)
            case fx.AskRejoin():
                worker.wants_to_join = True

    def _take_over(self, worker: Worker, plan: Plan, pool: TakeOver) -> None:
        """Follows a worker with an order to take over a pool. The core means its content at the pool's generation."""
        self._seen["pool taken over"] += 1
        sessions = [session for session in self._writers[pool.pool_id] if session[0] <= pool.generation]
        newest = max(since for since, _ in sessions)
        worker.provenance.take_over([writers for since, writers in sessions if since == newest][-1])
        # The new session is later than those that the pool's generation covers, although its worker may be older.
        self._writers[pool.pool_id].append((max(plan.generation, pool.generation), worker.provenance.writers))
        # If it cannot take that pool over, it keeps its own.
        self._writers[worker.joined_with].append((plan.generation, worker.provenance.writers))
