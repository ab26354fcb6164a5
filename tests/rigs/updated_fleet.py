"""The core and several content-checking workers that load new weights, on a virtual clock; every message is encoded.

Owns the messages in transit, what each stream has received, and the check of each token against the oracle of the
version that the stream's end names at its offset.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights
from scheduler_svc.core.messages.reports import WeightsReport
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.executor import Executor, Shape
from tests.rigs.oracle import next_token
from tests.rigs.sampling import Settings
from tests.scheduler_svc.core.world import hashes_of, info_of

FRONTEND, ROOT = "f-1", "/weights"


@dataclass(slots=True)
class Stream:
    submit: ev.Submit
    tokens: list[int] = field(default_factory=list[int])
    end: fx.End | None = None

    def versions(self) -> list[str]:
        """The version of each token, as the end names it."""
        assert self.end is not None
        spans = self.end.stats.weights
        assert not spans or spans[0].from_token == 0
        assert [span.from_token for span in spans] == sorted({span.from_token for span in spans})
        return [
            next((span.version for span in reversed(spans) if span.from_token <= n), "")
            for n in range(len(self.tokens))
        ]


@dataclass(slots=True)
class Worker:
    executor: Executor
    is_standby: bool = False
    inbox: deque[pb.CoreToWorker] = field(default_factory=deque[pb.CoreToWorker])
    outbox: deque[pb.WorkerToCore] = field(default_factory=deque[pb.WorkerToCore])
    # Why it refuses to load; empty: it loads.
    refusal: str = ""
    loads: list[pb.LoadWeights] = field(default_factory=list[pb.LoadWeights])


class UpdatedFleet:
    def __init__(self, *, num_workers: int = 1, seed: int = 0, shape: Shape | None = None, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or Shape(num_pages=60, max_rows=8, host_pages=8, page_copy_us=1.0, token_us=50.0)
        self.core = Scheduler(CoreConfig(prove_workers=True, weights_folders=(ROOT,), **config))
        self.now, self.num_workers, self.num_queries = 0.0, 0, 0
        self.workers: dict[str, Worker] = {}
        self.streams: dict[int, Stream] = {}
        self.reports: list[WeightsReport] = []
        self.refusals: list[fx.UpdateRefused] = []
        self.notes: list[str] = []
        self.statuses: list[fx.CoreStatus] = []
        self.changes: list[Weights] = []
        self.handle(ev.FrontendJoined(frontend=FRONTEND))
        for _ in range(num_workers):
            self.join()

    # Events and effects ----------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        effects = self.core.handle(event, self.now)
        audit(self.core)
        for effect in effects:
            self._take(effect)

    def _take(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan():
                self._send(effect.worker, worker_wire.plan_frame(effect.plan))
            case fx.LoadWeights():
                assert not self.core.lanes[effect.worker].in_flight, "weights are loaded while a plan is in flight"
                self._send(effect.worker, worker_wire.frame_of(effect))
            case fx.WorkerAccepted():
                self._send(effect.worker, worker_wire.frame_of(effect))
            case fx.StepOutput():
                self._output(effect)
            case fx.UpdateRefused():
                self.refusals.append(effect)
            case WeightsReport():
                self.reports.append(effect)
            case fx.WeightsChanged():
                self.changes.append(effect.weights)
            case fx.CoreStatus():
                self.statuses.append(effect)
            case fx.Note():
                self.notes.append(effect.message)
            case fx.Rejected():
                raise AssertionError(effect.message)
            case _:
                pass

    def _send(self, worker: str, frame: bytes) -> None:
        if worker in self.workers:
            self.workers[worker].inbox.append(pb.CoreToWorker.FromString(frame))

    def _output(self, effect: fx.StepOutput) -> None:
        for number, offset, token in zip(effect.streams, effect.offsets, effect.tokens, strict=True):
            tokens = self.streams[int(number)].tokens
            assert int(offset) == len(tokens), "a token is missing or came twice"
            tokens.append(int(token))
        for end in effect.ends:
            assert self.streams[end.stream].end is None
            self.streams[end.stream].end = end

    # Moves -----------------------------------------------------------------------------------------------------------

    def join(self, *, is_standby: bool = False, executor: Executor | None = None) -> str:
        self.num_workers += 1
        name = f"w-{self.num_workers}"
        worker = self.workers[name] = Worker(executor or Executor(self.shape), is_standby)
        version, folder = worker.executor.version, worker.executor.weights_folder
        info = replace(info_of(self.shape), is_standby=is_standby, weights_version=version, weights_folder=folder)
        self.handle(ev.WorkerJoined(worker=name, info=info))
        return name

    def kill(self, name: str) -> Executor:
        worker = self.workers.pop(name)
        self.handle(ev.WorkerLost(worker=name, reason="killed"))
        return worker.executor

    def submit(self, prompt: list[int], *, max_new_tokens: int = 8, **options: Any) -> Stream:
        number = len(self.streams) + 1
        settings = Settings(temperature=1.0, seed=number % 7)
        submit = ev.Submit(
            frontend=FRONTEND, stream=number, request_id=f"r{number}", prompt=np.array(prompt, np.int32),
            sampling=settings.encoded(), max_new_tokens=max_new_tokens, min_new_tokens=0, stop_token_ids=(),
            ignore_eos=True, priority=0, max_time_seconds=0.0, deadline_seconds=0.0, **options,
            **hashes_of(prompt, self.shape.page_size),
        )  # fmt: skip
        stream = Stream(submit)
        for idx in range(submit.num_samples):
            self.streams[number + idx] = stream if not idx else Stream(submit)
        self.handle(submit)
        return stream

    def update(
        self, version: str, running: Running = Running.RECOMPUTE, *, in_turn: bool = False, max_seconds: float = 600.0
    ) -> None:
        self.num_queries += 1
        self.handle(
            UpdateWeights(
                frontend=FRONTEND,
                query=self.num_queries,
                weights=Weights(version=version, folder=f"{ROOT}/{version}"),
                running=running,
                in_turn=in_turn,
                max_seconds=max_seconds,
            )
        )

    def tick(self, seconds: float = 0.001) -> None:
        self.now += seconds
        self.handle(ev.Tick())

    def work(self, name: str) -> bool:
        """The worker handles one message. Returns False without one."""
        worker = self.workers[name]
        if not worker.inbox:
            return False
        message = worker.inbox.popleft()
        match message.WhichOneof("message"):
            case "joined":
                worker.executor.joined(message.joined)
            case "plan":
                worker.outbox.append(pb.WorkerToCore(result=worker.executor.apply(message.plan)))
                assert worker.executor.violations == []
            case "load_weights":
                worker.loads.append(message.load_weights)
                loaded = worker.executor.load_weights(message.load_weights, refusal=worker.refusal)
                worker.outbox.append(pb.WorkerToCore(weights_loaded=loaded))
            case _:
                pass
        return True

    def deliver(self, name: str) -> bool:
        """The core gets the worker's oldest message. Returns False without one."""
        worker = self.workers[name]
        if not worker.outbox:
            return False
        message = pb.WorkerToCore.FromString(worker.outbox.popleft().SerializeToString())
        self.handle(worker_wire.event_of(message, name))
        return True

    def step(self) -> bool:
        """Each worker may handle and send a message. Returns False if nothing was to be done."""
        self.tick()
        return sum(self.work(name) | (name in self.workers and self.deliver(name)) for name in list(self.workers)) > 0

    def run_until_loading(self) -> str:
        """Steps until a worker has been told to load and has not begun; returns its name."""
        while True:
            self.tick()
            for name, lane in self.core.lanes.items():
                if lane.phases.is_loading:
                    return name
            for name in self.workers:
                self.work(name)
                self.deliver(name)

    def run(self, max_steps: int = 20_000) -> None:
        """Steps until nothing is left to do."""
        idle = 0
        for _ in range(max_steps):
            idle = 0 if self.step() else idle + 1
            if idle > 3:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    # Checks ----------------------------------------------------------------------------------------------------------

    def check(self, stream: Stream) -> None:
        """Asserts that each token is the oracle's of its version. Not for streams that continued with old pages."""
        prompt = stream.submit.prompt.tolist()
        settings = Settings(temperature=1.0, seed=stream.submit.stream % 7)
        for n, (token, version) in enumerate(zip(stream.tokens, stream.versions(), strict=True)):
            expected = next_token(
                [*prompt, *stream.tokens[:n]],
                num_prompt=len(prompt),
                settings=settings,
                vocab=self.shape.sampled_vocab,
                version=version,
            )
            assert token == expected, f"{stream.submit.request_id}: token {n} is not that of version {version!r}"

    def versions(self) -> dict[str, str]:
        """The version of each worker."""
        return {name: worker.executor.version for name, worker in self.workers.items()}
