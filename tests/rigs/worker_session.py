"""A checking worker's side of the protocol: joining, plans in, results out, heartbeats.

A machine without sockets: messages and the time go in, messages come out. Knows nothing of ZeroMQ, processes or
signals. It applies plans in order but late, and sends results later still, so that the core meets every order of events
that the protocol allows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.executor import Executor, Poisoned
from tests.rigs.faults import Faults
from tests.rigs.lateness import Lateness

_JOIN_RETRY_SECONDS = 1.0


class Phase(StrEnum):
    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"
    # Terminal: drained.
    LEAVING = "leaving"
    # Terminal: refused for good.
    STOPPED = "stopped"
    # Terminal, and silent.
    HUNG = "hung"
    # Terminal: the process ends without a message.
    EXITED = "exited"


@dataclass(slots=True)
class _Queued:
    plan: pb.StepPlan
    arrived: float
    apply_at: float


@dataclass(slots=True)
class _Held:
    result: pb.StepResult
    release_at: float


@dataclass(slots=True, kw_only=True)
class WorkerSession:
    """Call `receive` and `advance` with a clock that never goes back. `outgoing` has the messages to send."""

    join: pb.Join
    executor: Executor
    lateness: Lateness
    faults: Faults
    heartbeat_seconds: float
    retry_seconds: float
    max_in_flight: int
    on_violation: Callable[[str], None]
    on_phase: Callable[[str], None]
    phase: Phase = Phase.JOINING
    outgoing: deque[pb.WorkerToCore] = field(default_factory=deque)
    # Results since the last Joined; the first one answers the plan that proves the worker.
    num_answered: int = 0
    _queued: deque[_Queued] = field(default_factory=deque)
    _held: deque[_Held] = field(default_factory=deque)
    # Constraints that are not answered yet, and when they will be.
    _preparing: list[tuple[float, pb.PrepareConstraint]] = field(default_factory=list)
    _join_at: float = 0.0
    _heartbeat_at: float = 0.0
    # Generation and step of the newest result on this connection.
    _done: tuple[int, int] = (0, 0)

    @property
    def num_unanswered(self) -> int:
        """Plans of the newest generation without a result in `outgoing`."""
        generations = [queued.plan.generation for queued in self._queued]
        generations += [held.result.generation for held in self._held]
        return generations.count(max(generations, default=0)) if self.phase == Phase.JOINED else 0

    def receive(self, message: pb.CoreToWorker, now: float) -> None:
        match message.WhichOneof("message"):
            case "joined":
                self._forget_plans()
                self.executor.joined(message.joined)
                self.num_answered, self._done = 0, (0, 0)
                self._enter(Phase.JOINED, f"generation={message.joined.generation}")
                self._heartbeat_at = now
            case "refused":
                self._forget_plans()
                self._enter(Phase.REFUSED if message.refused.retry else Phase.STOPPED, message.refused.reason)
                self._join_at = now + self.retry_seconds
            case "rejoin":
                # If a Join is already on its way, it answers this Rejoin too.
                if self.phase == Phase.JOINED or (self.phase == Phase.JOINING and now >= self._join_at):
                    self.link_lost(now)
            case "seated":
                # After a lost connection it joins as a worker that serves.
                self.join.standby = False
                self.on_phase("seated")
            case "dismissed":
                self._forget_plans()
                self._enter(Phase.LEAVING, "drained")
            case "load_weights":
                loaded = self.executor.load_weights(message.load_weights)
                self.join.weights_version = self.executor.version
                self.join.weights_folder = self.executor.weights_folder
                self.outgoing.append(pb.WorkerToCore(weights_loaded=loaded))
            case "prepare_constraint":
                seconds = self.executor.prepare(message.prepare_constraint)
                ready_at = now + seconds + self.lateness.before_answer()
                self._preparing.append((ready_at, message.prepare_constraint))
            case "drop_constraint":
                self.executor.drop(message.drop_constraint)
            case "plan":
                self._queue(message.plan, now)
            case None:
                # The core sends empty frames to check that the worker is still connected.
                pass

    def link_lost(self, now: float) -> None:
        """Joins again, because the core is gone or does not know this worker."""
        self._forget_plans()
        self._enter(Phase.JOINING, "")
        self._join_at = now

    def hang(self) -> None:
        """Stops answering for good, once a request's plan is there to hang in."""
        if self.num_answered and self.num_unanswered:
            self._enter(Phase.HUNG, "as ordered")

    def join_unsent(self, now: float) -> None:
        """Schedules another try, because the core is not there yet."""
        self._join_at = now + 0.02

    def advance(self, now: float) -> None:
        """Does everything that is due."""
        if self.phase in (Phase.JOINING, Phase.REFUSED) and now >= self._join_at:
            if self.phase == Phase.REFUSED:
                self.phase = Phase.JOINING
            self.executor.report_pages(self.join)
            self.outgoing.append(pb.WorkerToCore(join=self.join))
            self._join_at = now + _JOIN_RETRY_SECONDS
        while self._queued and now >= self._queued[0].apply_at and self.phase == Phase.JOINED:
            self._apply(self._queued.popleft(), now)
        while self._held and now >= self._held[0].release_at and self.phase == Phase.JOINED:
            result = self._held.popleft().result
            self.outgoing.append(pb.WorkerToCore(result=result))
            self._done = result.generation, result.step
            self.num_answered += 1
        if self.phase == Phase.JOINED:
            self._answer_constraints(now)
        if self.phase == Phase.JOINED and now >= self._heartbeat_at:
            beat = pb.Heartbeat(
                phase="stepping" if self._queued or self._held else "ready",
                num_in_flight=len(self._queued) + len(self._held),
                generation=self._done[0],
                last_step=self._done[1],
            )
            self.outgoing.append(pb.WorkerToCore(heartbeat=beat))
            self._heartbeat_at = now + self.heartbeat_seconds

    def wait_seconds(self, now: float) -> float | None:
        """Returns the seconds until something is due, or None if only a message can wake the session."""
        if self.phase in (Phase.LEAVING, Phase.STOPPED, Phase.HUNG, Phase.EXITED):
            return None
        due = [self._heartbeat_at if self.phase == Phase.JOINED else self._join_at]
        if self._queued:
            due.append(self._queued[0].apply_at)
        due += [at for at, _ in self._preparing]
        if self._held:
            due.append(self._held[0].release_at)
        return max(0.0, min(due) - now)

    def _enter(self, phase: Phase, detail: str) -> None:
        self.phase = phase
        self.on_phase(f"{phase} {detail}".rstrip())

    def _forget_plans(self) -> None:
        self._queued.clear()
        self._held.clear()
        self._preparing.clear()

    def _answer_constraints(self, now: float) -> None:
        ready = [order for at, order in self._preparing if now >= at]
        self._preparing = [(at, order) for at, order in self._preparing if now < at]
        for order in ready:
            self.outgoing.append(pb.WorkerToCore(constraint_ready=self.executor.constraint_ready(order)))

    def _queue(self, plan: pb.StepPlan, now: float) -> None:
        if self.phase != Phase.JOINED:
            self.on_violation(f"plan {plan.generation}.{plan.step} came while {self.phase}")
            return
        if self.join.standby and plan.step > 1:
            self.on_violation(f"plan {plan.generation}.{plan.step} came to a worker on standby")
        in_flight = 1 + sum(queued.plan.generation == plan.generation for queued in self._queued)
        in_flight += sum(held.result.generation == plan.generation for held in self._held)
        if in_flight > self.max_in_flight:
            self.on_violation(f"plan {plan.generation}.{plan.step} is number {in_flight} in flight")
        before = self._queued[-1].apply_at if self._queued else now
        apply_at = max(before, now) + self.lateness.before_apply()
        self._queued.append(_Queued(plan=plan, arrived=now, apply_at=apply_at))

    def _apply(self, queued: _Queued, now: float) -> None:
        number = self.executor.num_applied + 1
        if number == self.faults.hang_step:
            self._enter(Phase.HUNG, f"step={number}")
            return
        if number == self.faults.exit_step:
            self._enter(Phase.EXITED, f"step={number}")
            return
        try:
            result = self.executor.apply(queued.plan)
        except Poisoned as poisoned:
            self._enter(Phase.HUNG if poisoned.hangs else Phase.EXITED, f"step={number} poisoned")
            return
        result.compute_us = int((now - queued.arrived) * 1e6)
        before = self._held[-1].release_at if self._held else now
        self._held.append(_Held(result=result, release_at=max(before, now) + self.lateness.before_answer()))
