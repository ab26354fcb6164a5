"""One random life of the core, drawn from a seed: everything that can happen, in any order, on a virtual clock.

Owns the clock, the draws and what is on its way. After each event every invariant is audited; at the end faults stop,
and everybody must get an answer.
"""

import random

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.invariants import audit
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.record import EffectsDigest
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.simulation.callers import Caller, Callers, poisoned
from tests.simulation.requests import random_submit
from tests.simulation.worker import Joined, Worker

# Tokens of prompts that are never drawn: logits behind the one are not finite, a step with the other fails.
POISON, KILLER = 272, 273
_MAX_WORKERS, _MAX_FRONTENDS = 3, 4
_MAX_FAULTY_STEP = 400
_FINALE_TICKS = 3000


class Episode:
    """`run` raises AssertionError, with the seed in its notes, where anything promised does not hold."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self.rng = random.Random(seed)
        rows, align = rng.randint(1, 5), rng.choice([1, 1, 2, 4])
        self.shape = Shape(
            page_size=rng.randint(1, 4),
            num_pages=rng.choice([2, 3, 4, 6, 8, 10, 14, 20, 30]),
            max_rows=rows,
            max_length=rng.choice([12, 24, 40]),
            chunk_align=align,
            token_budget=rows + align + rng.choice([0, 0, 1, 3, 7, 20]),
            spare_logit_rows=rng.choice([0, 0, 2, 5, 20]),
            vocab_size=280,
            sampled_vocab=rng.choice([5, 8]),
            eos_token_ids=rng.choice([(0,), (0, 1)]),
        )
        self.config = CoreConfig(
            max_waiting=rng.choice([2, 6, 20]),
            max_waiting_tokens=rng.choice([20, 60, 1000]),
            plans_in_flight=rng.randint(1, 3),
            step_timeout_seconds=5.0,
            silence_timeout_seconds=3.0,
            report_steps=True,
        )
        # Sampled tokens too may be what is not finite, in some episodes.
        self.nonfinite_token = rng.choice([POISON, POISON, 2, 4])
        self.failing_share = rng.choice([0.0, 0.0, 0.01, 0.05])
        self.lying_share = rng.choice([0.0, 0.0, 0.01])
        self.poison_share, self.killer_share = rng.choice([0.0, 0.05, 0.2]), rng.choice([0.0, 0.03, 0.1])
        self.core = Scheduler(self.config)
        self.now = 0.0
        self.log: list[tuple[float, ev.Event]] = []
        self.digest = EffectsDigest()
        self.callers = Callers(self.shape, plans_in_flight=self.config.plans_in_flight)
        self.frontends: list[str] = []
        self.workers: dict[str, Worker] = {}
        self._num_frontends = self._num_workers = 0

    def run(self, num_moves: int = 400) -> None:
        """The whole life, then the check that the same events give the same effects."""
        try:
            self._frontend_joins()
            self._worker_comes()
            moves, weights = zip(*self._moves(), strict=True)
            for move in self.rng.choices(moves, weights, k=num_moves):
                move()
            self._finale()
            self._check_replay()
        except Exception as error:
            error.add_note(f"seed {self.seed}; again: python -m tests.simulation {self.seed}")
            raise

    def _moves(self) -> list[tuple[object, float]]:
        return [
            (self._submit, 14), (self._end_from_outside, 6),
            (self._work, 18), (self._hear, 18), (self._tick, 24), (self._progress, 13), (self._heartbeats, 2),
            (self._rejoin, 1.5), (self._worker_comes, 0.7), (self._worker_dies, 0.7), (self._join_twice, 0.3),
            (self._long_silence, 0.3), (self._frontend_joins, 0.3), (self._frontend_dies, 0.2),
            (self._frontend_starts_anew, 0.1), (self._ask_load, 0.5), (self._drain, 0.02),
        ]  # fmt: skip

    # Events and effects ------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Hands the event in, audits, and carries the effects out."""
        self.log.append((self.now, event))
        effects = self.core.handle(event, self.now)
        self.digest.add(effects)
        audit(self.core)
        for effect in effects:
            self._carry_out(effect)
        lanes = self.core.lanes.values()
        if isinstance(event, ev.Tick) and lanes and not any(lane.in_flight for lane in lanes):
            assert not len(self.core.book), "requests live, and nothing was planned"
        return effects

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan():
                self.workers[effect.worker].inbox.append(effect.plan)
            case fx.WorkerAccepted():
                self.workers[effect.worker].inbox.append(Joined(generation=effect.generation))
            case fx.WorkerRefused():
                assert effect.retry
                self.workers[effect.worker].wants_to_join = True
            case fx.AskRejoin():
                self.workers[effect.worker].wants_to_join = True
            case fx.Admitted() | fx.Rejected() | fx.StepOutput():
                assert effect.frontend in self.frontends
                self.callers.take(effect, self.now)
            case _:
                pass

    # Callers -----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        rng = self.rng
        if not self.frontends:
            return
        # Streams are uint64.
        stream = len(self.callers.by_key) + rng.choice([0, 2**63])
        shares = ((POISON, self.poison_share), (KILLER, self.killer_share))
        submit = random_submit(
            rng,
            self.shape,
            frontend=rng.choice(self.frontends),
            stream=stream,
            doomed=[token for token, share in shares if rng.random() < share],
        )
        faulty = self.failing_share > 0 or self.nonfinite_token != POISON or poisoned(submit, POISON, KILLER)
        for idx, number in enumerate(submit.streams):
            caller = Caller(submit, idx, arrived_at=self.now, may_fail=faulty)
            self.callers.by_key[submit.frontend, number] = caller
        self.handle(submit)

    def _end_from_outside(self) -> None:
        rng, live = self.rng, self.callers.live()
        keys = live if live and rng.random() < 0.8 else list(self.callers.by_key)[-20:]
        if not keys:
            return
        frontend, stream = rng.choice(keys)
        caller = self.callers.by_key[frontend, stream]
        match rng.choice(["cancel", "finish", "abort"]):
            case "cancel":
                caller.gone = True
                self.handle(ev.Cancel(frontend=frontend, stream=stream))
            case "finish":
                heard = len(caller.tokens)
                caller.kept = rng.choice([0, heard, max(0, heard - 1), 1, 100])
                self.handle(ev.Finish(frontend=frontend, stream=stream, output_tokens=caller.kept))
            case _:
                name = caller.submit.request_id
                was_live = any(self.callers.by_key[frontend, number].live for number in caller.submit.streams)
                asker = rng.choice(self.frontends or ["nobody"])
                effects = self.handle(ev.Abort(frontend=asker, query=1, request_ids=(name, "unknown", name)))
                reply = next(effect for effect in effects if isinstance(effect, fx.AbortReply))
                assert reply.outcomes == ((name, was_live), ("unknown", False), (name, False))

    def _frontend_joins(self) -> None:
        if len(self.frontends) == _MAX_FRONTENDS:
            return
        self._num_frontends += 1
        self.frontends.append(f"f-{self._num_frontends}")
        self.handle(ev.FrontendJoined(frontend=self.frontends[-1]))

    def _frontend_dies(self) -> None:
        if self.frontends:
            frontend = self.frontends.pop(self.rng.randrange(len(self.frontends)))
            self.callers.hang_up(frontend)
            self.handle(ev.FrontendLost(frontend=frontend))

    def _frontend_starts_anew(self) -> None:
        if self.frontends:
            frontend = self.rng.choice(self.frontends)
            self.callers.hang_up(frontend)
            self.handle(ev.FrontendJoined(frontend=frontend))

    def _ask_load(self) -> None:
        if self.frontends:
            reply = self.handle(ev.LoadQuery(frontend=self.frontends[0], query=3))[0]
            assert isinstance(reply, fx.LoadReply)
            assert reply.load.output_tokens == self.callers.num_delivered
            assert reply.load.running + reply.load.waiting == len(self.callers.live())

    def _drain(self) -> None:
        self.handle(ev.DrainStarted())

    # Workers -----------------------------------------------------------------------------------------------------

    def _worker_comes(self) -> None:
        if len(self.workers) == _MAX_WORKERS:
            return
        self._num_workers += 1
        name = f"w-{self._num_workers}"
        self.workers[name] = Worker(name=name, shape=self._draw_shape(), faults=self._draw_faults())
        self._join(self.workers[name])

    def _draw_shape(self) -> Shape:
        """The episode's, or now and then a smaller one."""
        rng, shape = self.rng, self.shape
        if rng.random() < 0.8:
            return shape
        fields = {name: getattr(shape, name) for name in shape.__slots__}
        return Shape(
            **fields
            | {
                "num_pages": max(2, shape.num_pages - rng.randint(0, 4)),
                "max_rows": max(1, shape.max_rows - rng.randint(0, 2)),
                "max_length": shape.max_length - rng.choice([0, 0, 8]),
            }
        )

    def _draw_faults(self) -> Faults:
        drawn = [step for step in range(1, _MAX_FAULTY_STEP) if self.rng.random() < self.failing_share]
        return Faults(
            fail_steps=frozenset(drawn[::3]),
            oom_steps=frozenset(drawn[1::3]),
            out_of_sync_steps=frozenset(drawn[2::3]),
            fail_token=KILLER,
            nonfinite_token=self.nonfinite_token,
        )

    def _join(self, worker: Worker) -> None:
        worker.wants_to_join = False
        self.handle(worker.joining())

    def _join_twice(self) -> None:
        if self.workers:
            self._join(self._any_worker())

    def _rejoin(self) -> None:
        for worker in self.workers.values():
            if worker.wants_to_join and self.rng.random() < 0.7:
                self._join(worker)

    def _worker_dies(self) -> None:
        if self.workers:
            name = self._any_worker().name
            del self.workers[name]
            self.handle(ev.WorkerLost(worker=name, reason="killed"))

    def _any_worker(self) -> Worker:
        return self.rng.choice(list(self.workers.values()))

    def _work(self) -> None:
        if self.workers:
            worker = self._any_worker()
            for _ in range(self.rng.randint(1, 4)):
                worker.work()

    def _hear(self) -> None:
        if self.workers:
            worker = self._any_worker()
            for _ in range(self.rng.randint(1, 3)):
                self._deliver(worker, lying_share=self.lying_share)

    def _deliver(self, worker: Worker, *, lying_share: float = 0.0) -> bool:
        if not worker.results:
            return False
        result = worker.results.popleft()
        if self.rng.random() < lying_share and not self._corrupt(worker, result):
            return True
        self.handle(worker.event_of(result))
        return True

    def _corrupt(self, worker: Worker, result: pb.StepResult) -> bool:
        """Changes a result so that no core may believe it; False: it is lost."""
        match self.rng.choice(["lost", "twice", "step", "generation", "short", "outside", "logprobs", "prompt"]):
            case "lost":
                return False
            case "twice":
                worker.results.appendleft(result)
            case "step":
                result.step += 1
            case "generation":
                result.generation += 1
            case "short":
                result.tokens = result.tokens[:-4]
            case "logprobs":
                self._corrupt_logprobs(result.logprobs)
            case "prompt":
                self._corrupt_logprobs(result.prompt_logprobs)
            case _:
                result.nonfinite = np.array([self.rng.choice([-1, len(result.tokens) // 4])], "<i4").tobytes()
        return True

    def _corrupt_logprobs(self, told: pb.Logprobs) -> None:
        match self.rng.choice(["more", "less", "wider", "outside"]):
            case "less" if told.logprobs:
                told.logprobs = told.logprobs[:-4]
            case "wider" if told.logprobs:
                told.top_k += 1
            case "outside" if told.top_token_ids:
                told.top_token_ids = np.full(len(told.top_token_ids) // 4, self.shape.vocab_size, "<i4").tobytes()
            case _:
                told.logprobs += bytes(4)

    def _heartbeats(self) -> None:
        for worker in self.workers.values():
            if self.rng.random() < 0.8:
                self.handle(ev.WorkerAlive(worker=worker.name))

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
            for worker in self.workers.values():
                worker.work()
                self._deliver(worker)

    def _finale(self) -> None:
        """Lies and losses stop; what lives must end, and nothing may be held."""
        if self.rng.random() < 0.1:
            self.handle(ev.DrainEnded())
        idle = 0
        for _ in range(_FINALE_TICKS):
            if not len(self.core.book):
                break
            self.now += 0.0005
            self.handle(ev.Tick())
            lane = self.core.lane
            if lane is None:
                self._join(next(iter(self.workers.values()))) if self.workers else self._worker_comes()
                continue
            worker = self.workers[lane.worker]
            idle = 0 if worker.work() | self._deliver(worker) else idle + 1
            if idle > 2:
                # A result was lost; only patience helps.
                self.now += 2 * self.config.step_timeout_seconds
        core = self.core
        assert not len(core.book), f"{len(core.book)} requests live after {_FINALE_TICKS} steps"
        self.callers.check_answered()
        assert not core.suspects
        for lane in core.lanes.values():
            assert (lane.pool.num_used, lane.rows.num_seated) == (0, 0)

    def _check_replay(self) -> None:
        again, digest = Scheduler(self.config), EffectsDigest()
        for now, event in self.log:
            digest.add(again.handle(event, now))
        assert digest.value() == self.digest.value(), "the same events gave other effects"
