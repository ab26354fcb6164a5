"""The callers' side of an episode: front ends, requests, and the cancels, stops and aborts that end them.

Owns the front ends and, in `callers`, every request and its output. Knows nothing of workers, pages or plans.
"""

import random
from collections import Counter
from collections.abc import Callable

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import WorkerState
from scheduler_svc.core.messages.resources import KINDS
from tests.simulation.callers import Caller, Callers, poisoned
from tests.simulation.lingering import Lingering
from tests.simulation.requests import random_submit
from tests.simulation.setting import KILLER, LETHAL, POISON, Setting

Handle = Callable[[ev.Event], list[fx.Effect]]
_MAX_FRONTENDS, _MAX_HISTORIES = 4, 12


class Load:
    """Each public method is a move. A move that is impossible at the moment does nothing."""

    def __init__(self, rng: random.Random, setting: Setting, handle: Handle, seen: Counter[str]) -> None:
        self.callers = Callers(setting.shape, plans_in_flight=setting.config.plans_in_flight)
        self.frontends: list[str] = []
        self._rng = rng
        self._setting = setting
        self._handle = handle
        self._seen = seen
        self._num_frontends = 0
        self.lingering = Lingering(rng, self.callers, handle, seen)

    # Requests ----------------------------------------------------------------------------------------------------

    def submit(self, now: float) -> None:
        """Submits a random request."""
        rng, setting, callers = self._rng, self._setting, self.callers
        if not self.frontends:
            return
        submit = random_submit(
            rng,
            setting,
            frontend=rng.choice(self.frontends),
            # Streams are uint64.
            stream=callers.next_stream() + rng.choice([0, 2**63]),
            histories=[caller.history() for caller in callers.recent(_MAX_HISTORIES)],
        )
        faulty = (
            setting.failing_share > 0 or setting.nonfinite_token != POISON or poisoned(submit, POISON, KILLER, LETHAL)
        )
        for idx, number in enumerate(submit.streams):
            callers.add(number, Caller(submit, idx, arrived_at=now, may_fail=faulty))
        self._handle(submit)

    def end_from_outside(self) -> None:
        """Ends a stream, usually a live one, by a cancel, a stop string or an Abort."""
        rng, live = self._rng, self.callers.live()
        callers = live if live and rng.random() < 0.8 else self.callers.recent(20)
        if not callers:
            return
        caller = rng.choice(callers)
        match rng.choice(["cancel", "finish", "abort"]):
            case "cancel":
                caller.gone = True
                self._handle(ev.Cancel(frontend=caller.frontend, stream=caller.stream))
            case "finish":
                heard = len(caller.tokens)
                caller.kept = rng.choice([0, heard, max(0, heard - 1), 1, 100])
                self._handle(ev.Finish(frontend=caller.frontend, stream=caller.stream, output_tokens=caller.kept))
            case _:
                self._abort(caller)

    def _abort(self, caller: Caller) -> None:
        name, sender = caller.submit.request_id, self._rng.choice(self.frontends or ["unknown"])
        was_live = any(sibling.live for sibling in self.callers.siblings(caller))
        effects = self._handle(ev.Abort(frontend=sender, query=1, request_ids=(name, "unknown", name)))
        reply = next(effect for effect in effects if isinstance(effect, fx.AbortReply))
        assert reply.outcomes == ((name, was_live), ("unknown", False), (name, False))

    # Front ends --------------------------------------------------------------------------------------------------

    def frontend_joins(self) -> None:
        """Connects another front end, up to _MAX_FRONTENDS."""
        if len(self.frontends) == _MAX_FRONTENDS:
            return
        self._num_frontends += 1
        self.frontends.append(f"f-{self._num_frontends}")
        self._handle(ev.FrontendJoined(frontend=self.frontends[-1]))

    def frontend_dies(self) -> None:
        """Disconnects one of several front ends; the only one restarts instead."""
        if len(self.frontends) > 1:
            frontend = self.frontends.pop(self._rng.randrange(len(self.frontends)))
            self.callers.hang_up(frontend)
            self._handle(ev.FrontendLost(frontend=frontend))
        else:
            self.frontend_restarts()

    def frontend_restarts(self) -> None:
        """A front end sends a second Hello."""
        if self.frontends:
            frontend = self._rng.choice(self.frontends)
            self.callers.hang_up(frontend)
            self._handle(ev.FrontendJoined(frontend=frontend))

    def caller_returns(self) -> None:
        """A caller resumes its request."""
        self.lingering.resume(self.frontends)

    def query_load(self) -> None:
        """Asserts that the core's load figures agree with what callers have received."""
        if not self.frontends:
            return
        [reply] = self._handle(ev.LoadQuery(frontend=self.frontends[0], query=3))
        assert isinstance(reply, fx.LoadReply)
        load = reply.load
        assert load.output_tokens == self.callers.num_delivered
        assert load.running + load.waiting == len(self.callers.live())
        seated = [worker for worker in load.per_worker if not worker.is_standby]
        states = [worker.state for worker in load.per_worker]
        assert (load.workers, load.standby_workers) == (
            states.count(WorkerState.SERVING), states.count(WorkerState.STANDBY)
        )  # fmt: skip
        assert all(worker.is_standby for worker in load.per_worker if worker.state is WorkerState.STANDBY)
        assert load.running == sum(worker.running for worker in load.per_worker)
        assert load.pages_used == sum(worker.pages_used for worker in load.per_worker)
        assert load.pages_total == sum(worker.pages_total for worker in seated)
        assert load.pages_cached == sum(worker.pages_cached for worker in seated)
        assert load.pages_used + load.pages_cached <= load.pages_total
        assert load.host_pages_used <= load.host_pages_total
        assert 0 <= load.cached_prompt_tokens <= load.prompt_tokens

    def flush(self) -> None:
        """Flushes the prefix cache."""
        if self.frontends:
            [reply] = self._handle(ev.FlushCache(frontend=self.frontends[0], query=4))
            assert isinstance(reply, fx.FlushReply) and reply.query == 4
            self._seen["page flushed"] += reply.pages

    def drain(self) -> None:
        """Starts the drain; the core admits nothing from now on."""
        self._handle(ev.DrainStarted())

    # Effects -----------------------------------------------------------------------------------------------------

    def take(self, effect: fx.Admitted | fx.Rejected | fx.StepOutput, now: float) -> None:
        """Passes an answer of the core to its callers."""
        if isinstance(effect, fx.Rejected) and effect.stream == self.lingering.resuming:
            assert effect.code is fx.RejectCode.NOT_FOUND
            return
        assert effect.frontend in self.frontends or isinstance(effect, fx.StepOutput)
        self.callers.take(effect, now)
        if isinstance(effect, fx.Rejected) and effect.field in KINDS:
            self._seen[f"{effect.field} refused"] += 1
        if isinstance(effect, fx.Admitted):
            self.lingering.admitted(self.callers.by_key[effect.frontend, effect.stream].submit)
        if isinstance(effect, fx.StepOutput):
            for end in effect.ends:
                self._count(end)

    def _count(self, end: fx.End) -> None:
        seen, stats = self._seen, end.stats
        seen[f"end: {end.reason or (end.failure and end.failure.code)}"] += 1
        seen["end after a preemption"] += stats.preemptions > 0
        seen["end after a worker change"] += stats.worker_changes > 0
        seen["end with cached prompt"] += stats.cached_prompt_tokens > 0
