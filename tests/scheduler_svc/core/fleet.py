"""A world of several workers: the core, and a content-checking executor for each of them.

Owns the messages of each worker by itself; who applies, answers or dies, and when, the test says.
"""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.state.lane import Lane
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.world import World
from tests.simulation.worker import Joined, Worker


class Fleet(World):
    """Workers are called "a", "b", … in the order in which they join; one that is gone never comes back by its name."""

    def __init__(self, *shapes: Shape, config: CoreConfig | None = None) -> None:
        self.workers: dict[str, Worker] = {}
        self.plans_of: dict[str, list[Plan]] = {}
        super().__init__(shapes[0] if shapes else None, config, join=False)
        for shape in shapes:
            self.join_as(shape)

    def join_as(self, shape: Shape, faults: Faults | None = None) -> str:
        """A new worker joins; its name."""
        name = chr(ord("a") + len(self.plans_of))
        self.workers[name] = Worker(name=name, shape=shape, faults=faults or Faults())
        self.plans_of[name] = []
        self.handle(self.workers[name].joining())
        return name

    def _take(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan():
                self.sent.append(effect.plan)
                self.plans_of[effect.worker].append(effect.plan)
                self.workers[effect.worker].inbox.append(effect.plan)
            case fx.WorkerAccepted():
                self.workers[effect.worker].inbox.append(Joined(generation=effect.generation))
            case _:
                super()._take(effect)

    def lane_of(self, name: str) -> Lane:
        """The worker's lane; it must serve."""
        return self.core.lanes[name]

    def lose(self, name: str) -> Worker:
        """The worker dies with whatever it has not said; that is still there to be said too late."""
        worker = self.workers.pop(name)
        self.handle(ev.WorkerLost(worker=name, reason="killed"))
        return worker

    def work(self, name: str) -> bool:
        """The worker takes in all that came, and answers nothing yet; False where nothing had come."""
        worker, busy = self.workers[name], False
        while worker.work():
            busy = True
        return busy

    def hear(self, name: str) -> bool:
        """The core hears the worker's oldest answer; False where there is none."""
        worker = self.workers[name]
        if not worker.results:
            return False
        self.handle(worker.event_of(worker.results.popleft()))
        return True

    def step(self, seconds: float = 0.0) -> None:
        """A tick, and one answer of each worker."""
        self.tick(seconds)
        for name in list(self.workers):
            self.work(name)
            self.hear(name)

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            self.tick(0.001)
            busy = [self.work(name) | self.hear(name) for name in list(self.workers)]
            if not any(busy):
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def running(self, name: str) -> list[int]:
        """The streams that run there, by row."""
        rows = self.lane_of(name).rows
        return [request.stream for request in rows.requests_at(rows.seated())]

    def started(self, name: str) -> list[list[int]]:
        """The prompts of the rows started there, in order."""
        plans = self.plans_of[name]
        return [start.tokens[: start.num_prompt_tokens].tolist() for plan in plans for start in plan.starts]
