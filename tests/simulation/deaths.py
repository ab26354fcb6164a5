"""One random run over several lives of the scheduler, drawn from a seed: deaths of the core, its workers and readers.

Owns the moves. `lives.py` has the service and its callers. What a caller got must be a prefix of what it gets later,
and equal the oracle's; a request that lingers is lost only if the scheduler died while it could not write its journal.
"""

import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Running
from tests.rigs.resources import are_known
from tests.rigs.session_log import SessionLog
from tests.simulation.lives import FRONTEND, Died, Lives

_MAX_LIVE = 10


class Deaths:
    """`run` raises AssertionError, with the seed in its notes, if a check fails."""

    def __init__(self, seed: int, *, operations: int = 250, session: SessionLog | None = None) -> None:
        """`session` gets the events and effects of every life."""
        # Updates empty all caches, so half of the runs go without.
        self.seed, self.updates = seed, seed % 8 == 0
        self.operations, self._session = operations, session
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Makes random moves, then lets everything end."""
        with TemporaryDirectory(prefix="tandem-lives-") as folder:
            lives = Lives(Path(folder) / "journal", self.seed, session=self._session)
            try:
                self._run(lives)
            except Exception as error:
                within = " within tests.rigs.resources.adapters()" if are_known() else ""
                what = f"Deaths({self.seed}, operations={self.operations}) of tests.simulation.deaths{within}"
                error.add_note(f"seed {self.seed}, life {lives.num_lives}; replay: {what}")
                raise
            finally:
                lives.close()

    def _run(self, lives: Lives) -> None:
        lives.begin()
        for _ in range(self.operations):
            try:
                self._move(lives)
            except Died:
                self.seen["core died before it sent"] += 1
                self._die(lives)
        self._die(lives)
        lives.run()
        assert all(caller.done for caller in lives.callers), "a request never ended"
        lives.check()

    def _move(self, lives: Lives) -> None:
        rng, live = lives.random, [caller for caller in lives.callers if caller.accepted and not caller.done]
        chance = rng.random()
        if chance < 0.12 and len(live) < _MAX_LIVE:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            own = random.Random(f"adapter of {self.seed}, {len(lives.callers)}")
            adapter = own.choice([b"", b"an adapter", b"another adapter"]) if are_known() else b""
            lives.submit(
                prompt, max_new_tokens=rng.randint(1, 30), num_samples=rng.choice([1, 1, 2, 3]),
                linger=rng.choice([0.0, 30.0, 60.0]), seed=rng.randrange(100),
                constraint=rng.choice([b"", b"", b"a toy", b"another, toy_complete=4"]),
                adapter=adapter,
            )  # fmt: skip
        elif chance < 0.16 and live:
            self._lose_reader(lives)
        elif chance < 0.17:
            self._lose_worker(lives)
        elif chance < 0.18:
            self.seen["core died"] += 1
            self._die(lives)
        elif chance < 0.185:
            self.seen["core died without a journal"] += 1
            lives.suspend()
            self._die(lives)
        elif chance < 0.195:
            lives.die_unsent = True
        elif chance < 0.205 and self.updates:
            self.seen["update between deaths"] += 1
            lives.update_weights(rng.choice([Running.RECOMPUTE, Running.FINISH]))
        else:
            lives.step(rng.choice(list(lives.workers)))

    def _lose_reader(self, lives: Lives) -> None:
        rng = lives.random
        lingering = [caller for caller in lives.callers if caller.submit.linger_seconds and not caller.done]
        for caller in lingering[:1]:
            lives.turn(ev.Cancel(frontend=FRONTEND, stream=caller.stream, detach=True))
            for _ in range(rng.choice([0, 5])):
                lives.step(rng.choice(list(lives.workers)))
            lives.resume(caller)
            self.seen["reader lost"] += 1

    def _lose_worker(self, lives: Lives) -> None:
        name = lives.random.choice(list(lives.workers))
        # Mostly in order, because many deaths among so few requests would convict one.
        is_orderly = lives.random.random() < 0.8
        reason = "it stops" if is_orderly else "lost"
        lives.turn(ev.WorkerLost(worker=name, reason=reason, is_orderly=is_orderly))
        self.seen["suspects"] += len(lives.core.suspects)
        lives.join(name)

    def _die(self, lives: Lives) -> None:
        """Ends a life. In the next one workers join before or after the callers try to resume."""
        waiting = sum(not caller.done and caller.submit.linger_seconds > 0 for caller in lives.callers)
        lives.kill()
        lives.die_unsent = False
        for name in lives.workers:
            self._run_plans_of_the_dead(lives, name)
        lives.begin(workers=lives.random.random() < 0.7)
        self.seen["restored suspects"] += len(lives.core.suspects)
        lives.resume_all()
        for name in lives.workers:
            lives.join(name)
        lives.resume_all()
        self.seen["resumed after the core's death"] += waiting
        self.seen["pages kept over a death"] += sum(lives.pages_kept)

    def _run_plans_of_the_dead(self, lives: Lives, name: str) -> None:
        """The worker runs some of the plans that the core sent before its death; the last of them may fail halfway."""
        executor, plans = lives.workers[name].executor, lives.workers[name].plans
        num_run = lives.random.randint(0, len(plans))
        fails = num_run > 0 and lives.random.random() < 0.3
        executor.fail_at({executor.num_applied + num_run} if fails else ())
        for _ in range(num_run):
            executor.apply(plans.popleft())
        if (loads := lives.workers[name].loads) and not plans and lives.random.random() < 0.5:
            executor.load_weights(loads.popleft())
            self.seen["weights loaded for a dead core"] += 1
        self.seen["plan of a dead core was run"] += num_run
        self.seen["plan of a dead core failed"] += fails
