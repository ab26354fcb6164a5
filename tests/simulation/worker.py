"""A worker of the simulation: the content-checking executor, and the messages to it and from it.

Owns those messages, which wait until an episode delivers them. Decides nothing.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.plan import KeptPages, Plan
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.worker import kept_pages_of
from tests.rigs.executor import Executor, Poisoned, Shape
from tests.rigs.faults import Faults
from tests.rigs.page_pool import Slots
from tests.rigs.resources import WithAdapters, are_known
from tests.scheduler_svc.core.world import info_of, received
from tests.simulation.provenance import Provenance


def reported_pages(executor: Executor) -> KeptPages | None:
    """The pages that its Join reports, encoded and parsed."""
    join = pb.Join(page_size=executor.shape.page_size, num_pages=executor.shape.num_pages)
    executor.report_pages(join)
    return kept_pages_of(pb.Join.FromString(join.SerializeToString()))


@dataclass(slots=True, kw_only=True)
class Joined:
    """The core accepted the worker."""

    effect: fx.WorkerAccepted

    @property
    def message(self) -> pb.Joined:
        """The message, encoded and parsed."""
        return pb.CoreToWorker.FromString(worker_wire.frame_of(self.effect)).joined


Message = Plan | Joined | pb.LoadWeights | fx.PrepareResource | fx.DropResource


@dataclass(slots=True, kw_only=True)
class Worker:
    """A worker that may have joined; only the core knows whether it has a lane."""

    name: str
    shape: Shape
    faults: Faults
    is_standby: bool = False
    pool_id: bytes = b""
    # The memory of dead workers' pools.
    shared: dict[bytes, Slots] = field(default_factory=dict[bytes, Slots])
    # The pool that its last accepted Join named.
    joined_with: bytes = b""
    wants_to_join: bool = True
    is_hung: bool = False
    # A plan has killed it; its earlier results may still arrive.
    is_poisoned: bool = False
    # The core has drained it.
    is_dismissed: bool = False
    inbox: deque[Message] = field(default_factory=deque[Message])
    # Answers to orders to load weights.
    answers: deque[pb.WeightsLoaded] = field(default_factory=deque[pb.WeightsLoaded])
    # Orders to prepare resources that it has not answered.
    preparing: list[pb.PrepareConstraint] = field(default_factory=list[pb.PrepareConstraint])
    # Why it takes no constraints.
    constraint_refusal: str = ""
    # Why it takes no adapters, where they are known.
    adapter_refusal: str = ""
    # Why it refuses the next weights; empty: it loads.
    refusal: str = ""
    results: deque[pb.StepResult] = field(default_factory=deque[pb.StepResult])
    # Generation and step of the last result that has left it, whether it arrived or was lost.
    done: tuple[int, int] = 0, 0
    executor: Executor = field(init=False)
    provenance: Provenance = field(init=False)

    def __post_init__(self) -> None:
        self.executor = Executor(
            self.shape, faults=self.faults, pool_id=self.pool_id, shared=self.shared, tokens_by_version=False
        )
        self.provenance = Provenance(self.shape.page_size)

    @property
    def info(self) -> WorkerInfo:
        """The info that its Join carries."""
        pool_id = self.executor.pool_id
        info = replace(
            info_of(self.shape),
            is_standby=self.is_standby,
            constraint_refusal=self.constraint_refusal,
            pool_id=pool_id,
            pool_layout=b"layout" if pool_id else b"",
            weights_version=self.executor.version,
            weights_folder=self.executor.weights_folder,
        )
        return WithAdapters.of(info, self.adapter_refusal) if are_known() else info

    def joining(self) -> ev.WorkerJoined:
        """The event of its Join. It carries out no plan that comes before the answer."""
        self.inbox.clear()
        self.answers.clear()
        self.preparing.clear()
        return ev.WorkerJoined(worker=self.name, info=self.info, kept=reported_pages(self.executor))

    def alive(self) -> ev.WorkerAlive:
        """The event of its heartbeat, which comes right behind the last result that has left it."""
        num_in_flight = len(self.results) + sum(isinstance(message, Plan) for message in self.inbox)
        return ev.WorkerAlive(worker=self.name, num_in_flight=num_in_flight, done=self.done)

    def work(self) -> bool:
        """Handles its oldest message, encoded and parsed. Returns False without one, and while it hangs."""
        if self.is_hung or self.is_poisoned or not self.inbox:
            return False
        message = self.inbox.popleft()
        if isinstance(message, Joined):
            self.executor.joined(message.message)
            return True
        if isinstance(message, pb.LoadWeights):
            self.answers.append(self.executor.load_weights(message, refusal=self.refusal))
            return True
        if isinstance(message, fx.PrepareResource | fx.DropResource):
            order = pb.CoreToWorker.FromString(worker_wire.frame_of(message))
            if isinstance(message, fx.PrepareResource):
                self.executor.prepare(order.prepare_constraint)
                self.preparing.append(order.prepare_constraint)
            else:
                self.executor.drop(order.drop_constraint)
            assert not self.executor.violations, f"{self.name}: {self.executor.violations[0]}"
            return True
        try:
            result = self.executor.apply(pb.CoreToWorker.FromString(worker_wire.plan_frame(message)).plan)
        except Poisoned:
            self.is_poisoned = True
            return True
        self.results.append(result)
        assert not self.executor.violations, f"{self.name}: {self.executor.violations[0]}"
        return True

    def constraint_ready(self, idx: int = 0) -> ev.Event:
        """The event that the core receives for one of the resources that are not answered."""
        return received(self.name, constraint_ready=self.executor.constraint_ready(self.preparing.pop(idx)))

    def answer(self) -> ev.Event:
        """The event that the core receives for its oldest answer."""
        return received(self.name, weights_loaded=self.answers.popleft())

    def event_of(self, result: pb.StepResult) -> ev.Event:
        """The event that the core receives for this result."""
        return received(self.name, result=result)
