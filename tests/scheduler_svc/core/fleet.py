"""A world with several workers: the core, and for each worker an executor that checks its content.

Each worker has its own queues of messages. The test decides when a worker applies a plan, answers or dies.
"""

from dataclasses import replace
from typing import Any

from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.wire.worker import frame_of
from tests.rigs.executor import Executor, Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import World, greedy
from tests.simulation.worker import Joined, Worker


class Fleet(World):
    """Workers are named "a", "b" and so on in the order in which they join. No name is used twice."""

    def __init__(self, *shapes: Shape, config: CoreConfig | None = None) -> None:
        self.workers: dict[str, Worker] = {}
        self.plans_of: dict[str, list[Plan]] = {}
        super().__init__(shapes[0] if shapes else None, config, join=False)
        for shape in shapes:
            self.join_as(shape)

    def join_as(
        self,
        shape: Shape,
        faults: Faults | None = None,
        *,
        name: str = "",
        executor: Executor | None = None,
        info: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Lets a new worker join and returns its name. `fields` are those of a `Worker`, `info` others of its info."""
        name = name or chr(ord("a") + len(self.plans_of))
        worker = Worker(name=name, shape=shape, faults=faults or Faults(), **fields)
        worker.executor = executor or worker.executor
        self.workers[name], self.plans_of[name] = worker, []
        joining = worker.joining()
        self.handle(replace(joining, info=replace(joining.info, **(info or {}))))
        return name

    def _take(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan():
                self.sent.append(effect.plan)
                self.plans_of[effect.worker].append(effect.plan)
                self.workers[effect.worker].inbox.append(effect.plan)
            case fx.PrepareResource() | fx.DropResource():
                self.workers[effect.worker].inbox.append(effect)
            case fx.LoadWeights():
                order = pb.CoreToWorker.FromString(frame_of(effect)).load_weights
                self.workers[effect.worker].inbox.append(order)
            case fx.WorkerAccepted():
                self.workers[effect.worker].inbox.append(Joined(effect=effect))
            case _:
                super()._take(effect)

    def lane_of(self, name: str) -> Lane:
        """Returns the lane of a present worker."""
        return self.core.lanes[name]

    def lose(self, name: str, *, is_orderly: bool = False) -> Worker:
        """Removes the worker, as if it had died, and returns it. Its undelivered results can still be sent late."""
        worker = self.workers.pop(name)
        self.handle(ev.WorkerLost(worker=name, reason="killed", is_orderly=is_orderly))
        return worker

    def apply_plans(self, name: str) -> bool:
        """Lets the worker apply all messages in its inbox. Returns False if there were none."""
        worker, busy = self.workers[name], False
        while worker.work():
            busy = True
        return busy

    def deliver_from(self, name: str) -> bool:
        """Delivers the worker's oldest result, or answer about weights, to the core. Returns False without one."""
        worker = self.workers[name]
        if not worker.results and not worker.answers:
            return False
        self.handle(worker.event_of(worker.results.popleft()) if worker.results else worker.answer())
        return True

    def serve(self, name: str) -> bool:
        """Lets the worker apply all messages, and delivers its oldest result. Returns False if there was neither."""
        return self.apply_plans(name) | self.deliver_from(name)

    def answer_from(self, name: str) -> bool:
        """Delivers the worker's oldest answer for a constraint, unless `holds_answers`. Returns False if it did not."""
        worker = self.workers[name]
        if self.holds_answers or not worker.preparing:
            return False
        self.handle(worker.constraint_ready())
        return True

    def step(self, seconds: float = 0.0) -> None:
        """Ticks, then delivers one result of each worker."""
        self.tick(seconds)
        for name in list(self.workers):
            self.serve(name)
            self.answer_from(name)

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do. Raises AssertionError after `max_steps`."""
        for _ in range(max_steps):
            self.tick(0.001)
            if not sum(self.serve(name) | self.answer_from(name) for name in list(self.workers)):
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def running(self, name: str) -> list[int]:
        """Returns the streams that run on the worker, by row."""
        rows = self.lane_of(name).rows
        return [request.stream for request in rows.requests_at(rows.seated())]

    def started(self, name: str) -> list[list[int]]:
        """Returns the prompts of the rows started on the worker, in order."""
        plans = self.plans_of[name]
        return [start.tokens[: start.num_prompt_tokens].tolist() for plan in plans for start in plan.starts]


# Workers are proven before they serve, and steps are reported.
STRICT = greedy(prove_workers=True, report_steps=True)
ROOMY = Shape(page_size=4, num_pages=128, max_rows=8, token_budget=256, max_length=100)


def proven_fleet(*standbys: bool) -> Fleet:
    """Workers "a", "b" and so on of the shape ROOMY, serving or on standby, each proven before the next one joins."""
    fleet = Fleet(config=STRICT)
    fleet.shape = ROOMY
    for is_standby in standbys:
        fleet.join_as(ROOMY, is_standby=is_standby)
        fleet.step(0.01)
    return fleet
