"""The workers' side of an episode: who joined, what is on its way, what goes wrong.

Owns the workers and the messages between them and the core. Knows nothing of callers.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.simulation.lies import corrupt
from tests.simulation.setting import Setting, draw_faults, draw_worker_shape
from tests.simulation.worker import Joined, Worker

Handle = Callable[[ev.Event], list[fx.Effect]]
SubmitAt = Callable[[fx.SendPlan, int], ev.Submit]


class Fleet:
    """Each public method without a result is a move; those that cannot be made do nothing."""

    def __init__(self, rng: random.Random, setting: Setting, handle: Handle, seen: Counter[str]) -> None:
        self.workers: dict[str, Worker] = {}
        self._rng = rng
        self._setting = setting
        self._handle = handle
        self._seen = seen
        self._num_workers = 0
        # The last one that died, with what it had not said.
        self._ghost: Worker | None = None

    # Coming and going --------------------------------------------------------------------------------------------

    def come(self) -> None:
        """A new worker joins, up to a few."""
        if len(self.workers) < self._setting.max_workers:
            self._come(draw_worker_shape(self._rng, self._setting))

    def _come(self, shape: Shape) -> None:
        self._num_workers += 1
        name = f"w-{self._num_workers}"
        self.workers[name] = Worker(name=name, shape=shape, faults=draw_faults(self._rng, self._setting))
        self._join(self.workers[name])

    def come_in_full_size(self) -> None:
        """In place of another where all places are taken: whatever was admitted fits it."""
        if len(self.workers) == self._setting.max_workers:
            self.die()
        self._come(self._setting.shape)

    def come_as_another(self) -> None:
        """A worker of another model, which must be refused for good."""
        info = replace(next(iter(self.workers.values())).info, identity="another") if self.workers else None
        if info is None:
            return
        effects = self._handle(ev.WorkerJoined(worker="stranger", info=info))
        if any(isinstance(effect, fx.WorkerAccepted) for effect in effects):
            # On probation: no worker has been proven yet, so none has the better claim.
            self._handle(ev.WorkerLost(worker="stranger", reason="killed"))
            return
        assert [effect.retry for effect in effects if isinstance(effect, fx.WorkerRefused)] == [False]

    def _join(self, worker: Worker) -> None:
        worker.wants_to_join = False
        self._handle(worker.joining())

    def join_twice(self) -> None:
        """One that serves says hello again."""
        if self.workers:
            self._join(self._any())

    def rejoin(self) -> None:
        """Those that were told to, or refused for now."""
        for worker in list(self.workers.values()):
            if worker.wants_to_join and self._rng.random() < 0.7:
                self._join(worker)

    def die(self) -> None:
        """One is gone, with all that it had not said."""
        if self.workers:
            self._ghost = self.workers.pop(self._any().name)
            self._handle(ev.WorkerLost(worker=self._ghost.name, reason="killed"))

    def haunt(self) -> None:
        """A result of the one that died last comes in late."""
        if self._ghost is not None and self._ghost.results:
            self._handle(self._ghost.event_of(self._ghost.results.popleft()))

    def heartbeats(self) -> None:
        """Most workers say that they live."""
        for worker in list(self.workers.values()):
            if self._rng.random() < 0.8:
                self._handle(ev.WorkerAlive(worker=worker.name))

    def _any(self) -> Worker:
        return self._rng.choice(list(self.workers.values()))

    # Steps -------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """One worker carries out a few plans."""
        if self.workers:
            worker = self._any()
            for _ in range(self._rng.randint(1, 4)):
                worker.work()

    def hear(self) -> None:
        """The core hears a few results of one worker, true ones or not."""
        if self.workers:
            worker = self._any()
            for _ in range(self._rng.randint(1, 3)):
                self._deliver(worker, lying_share=self._setting.lying_share)

    def step_all(self) -> bool:
        """Each worker takes in a message and the core hears a result; False where there was nothing."""
        busy = [worker.work() | self._deliver(worker, lying_share=0.0) for worker in list(self.workers.values())]
        return any(busy)

    def _deliver(self, worker: Worker, *, lying_share: float) -> bool:
        if not worker.results:
            return False
        result = worker.results.popleft()
        if self._rng.random() < lying_share:
            match self._rng.choice(["lost", "twice", "another"]):
                case "lost":
                    return True
                case "twice":
                    worker.results.appendleft(result)
                case _:
                    corrupt(self._rng, result, vocab_size=worker.shape.vocab_size)
        self._handle(worker.event_of(result))
        return True

    # Effects -----------------------------------------------------------------------------------------------------

    def take(
        self, effect: fx.SendPlan | fx.WorkerAccepted | fx.WorkerRefused | fx.AskRejoin, submit_at: SubmitAt
    ) -> None:
        """What the core tells a worker. `submit_at` tells whose row of a plan it is."""
        worker = self.workers.get(effect.worker)
        if worker is None:
            # To the dead and to strangers it says nothing that matters.
            assert isinstance(effect, fx.WorkerRefused | fx.AskRejoin) or effect.worker == "stranger"
            return
        match effect:
            case fx.SendPlan():
                worker.inbox.append(effect.plan)
                worker.provenance.follow(effect.plan, lambda row: submit_at(effect, row), self._seen)
            case fx.WorkerAccepted():
                worker.inbox.append(Joined(generation=effect.generation))
            case fx.WorkerRefused():
                assert effect.retry
                worker.wants_to_join = True
            case fx.AskRejoin():
                worker.wants_to_join = True
