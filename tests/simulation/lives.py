"""One service over several lives of its core: a real journal, executors that check their content, a virtual clock.

A life ends between two turns, or within one: after the journal was written and before a front end got its tokens.
Callers resume their requests in the next life. They check offsets and compare with the oracle.
"""

import logging
import random
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.invariants import audit
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.operators import Running
from scheduler_svc.core.messages.page_hash import root_name
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.file import Sync
from scheduler_svc.journal.keeper import JournalKeeper, OpenedJournal
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.core_events import WEIGHTS_ROOT, submit, update_weights
from tests.rigs.executor import Executor, Shape
from tests.rigs.resources import resources_of
from tests.rigs.sampling import Settings
from tests.rigs.session_log import SessionLog, over_the_wire
from tests.scheduler_svc.core.stream import completion
from tests.scheduler_svc.core.world import hashes_of, info_of, received
from tests.simulation.worker import reported_pages

FRONTEND = "f"
UNIX_TIME = 1_700_000_000.0


class Died(Exception):
    """The scheduler was killed within a turn."""


@dataclass(slots=True)
class Caller:
    """The caller of one request, and what it has received of each sample."""

    submit: ev.Submit
    stream: int
    received: list[list[int]]
    ends: list[fx.End | None]
    accepted: bool = False
    lost: bool = False

    @property
    def done(self) -> bool:
        return self.lost or all(self.ends)

    def take(self, effect: fx.StepOutput) -> None:
        for i, stream in enumerate(range(self.stream, self.stream + self.submit.num_samples)):
            for entry in np.flatnonzero(effect.streams == np.uint64(stream)).tolist():
                offset = int(effect.offsets[entry])
                assert offset == len(self.received[i]), f"{self.submit.request_id}: a token is missing or came twice"
                self.received[i].append(int(effect.tokens[entry]))
            for end in effect.ends:
                if end.stream == stream:
                    assert self.ends[i] is None, f"{self.submit.request_id}: a second end"
                    self.ends[i] = end

    def resumed(self, effect: fx.Resumed) -> None:
        """What the caller has must be what the core has, as far as it goes."""
        for i, (tokens, end) in enumerate(zip(effect.outputs, effect.ends, strict=True)):
            have = self.received[i]
            assert tokens[: len(have)].tolist() == have, f"{self.submit.request_id}: received tokens changed"
            self.received[i] = tokens.tolist()
            assert end is not None or self.ends[i] is None, f"{self.submit.request_id}: an end was taken back"
            self.ends[i] = end

    def check(self, shape: Shape) -> None:
        """Compares with the oracle."""
        for i, (tokens, end) in enumerate(zip(self.received, self.ends, strict=True)):
            version_of = partial(_version, () if end is None else end.stats.weights)
            expected = completion(self.submit, i, shape, version_of)
            assert tokens == list(expected.tokens[: len(tokens)])
            if end is not None and end.reason not in (fx.EndReason.STOP_STRING, fx.EndReason.CONTEXT_FULL):
                if end.failure is not None:
                    # Random deaths of workers may convict an innocent request.
                    assert "its worker died or hung" in end.failure.message, end.failure
                    continue
                assert tokens == list(expected.tokens)


def _version(spans: tuple[WeightsSpan, ...], token: int) -> str:
    """The version that the spans name for an output token."""
    return next((span.version for span in reversed(spans) if span.from_token <= token), "")


@dataclass(slots=True)
class _Worker:
    executor: Executor
    plans: deque[pb.StepPlan] = field(default_factory=deque[pb.StepPlan])
    preparing: deque[pb.PrepareConstraint] = field(default_factory=deque[pb.PrepareConstraint])
    results: deque[pb.StepResult] = field(default_factory=deque[pb.StepResult])
    loads: deque[pb.LoadWeights] = field(default_factory=deque[pb.LoadWeights])


class Lives:
    """`begin` starts a life, `kill` ends it. Workers outlive it and join again."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        *,
        shape: Shape | None = None,
        num_workers: int = 2,
        session: SessionLog | None = None,
    ) -> None:
        """`session` gets the events and effects of every life."""
        self.folder = folder
        self._session, self._seed = session, seed
        self.random = random.Random(seed)
        self.shape = shape or Shape(num_pages=40, max_rows=6)
        self.now = 50.0
        self.callers: list[Caller] = []
        self.workers = {f"w-{i}": _Worker(Executor(self.shape)) for i in range(num_workers)}
        self.generations: list[int] = []
        # Known tokens and first position to compute of every started row, in this life.
        self.starts: list[tuple[int, int]] = []
        # For each worker that joined: the pages that it has kept.
        self.pages_kept: list[int] = []
        self.roots: set[bytes] = set()
        self.num_lives = self.num_updates = 0
        self.identity = "identity"
        self._next_stream, self._died_at = 1, 0.0
        self._stack = ExitStack()
        # 1: die after the journal of the next turn was written; the turn is not sent.
        self.die_unsent = False

    # A life ---------------------------------------------------------------------------------------------------------

    def begin(self, *, workers: bool = True) -> None:
        journal = self.journal = OpenedJournal(self.folder, sync=Sync.OFF, max_bytes=1 << 24, stack=self._stack)
        journal.saved.written_at = self._died_at
        if not journal.saved.state.cache_root:
            # Drawn by the service; here a run repeats exactly.
            journal.cache_root = sha256(f"{self._seed} {self.num_lives}".encode()).digest()
        self.roots.add(journal.cache_root)
        config = CoreConfig(
            report_detached=True,
            first_generation=journal.first_generation,
            page_root=root_name(journal.cache_root),
            weights_folders=(WEIGHTS_ROOT,),
        )
        self.core = Scheduler(config)
        if self._session is not None:
            self._session.begin(config)
        self.keeper = JournalKeeper(journal, self.core)
        # All times are those of the virtual clock.
        self.keeper._clock = lambda: UNIX_TIME + self.now
        self.num_lives += 1
        self.starts.clear()
        self.pages_kept.clear()
        self.send(self.keeper.restore(self.handle, self.now))
        self.turn(ev.FrontendJoined(frontend=FRONTEND))
        if workers:
            for name in self.workers:
                self.join(name)

    def join(self, name: str, shape: Shape | None = None) -> None:
        """`shape` is that of a new worker."""
        if shape is not None:
            self.workers[name] = _Worker(Executor(shape))
        worker = self.workers[name]
        worker.plans.clear()
        worker.results.clear()
        worker.preparing.clear()
        worker.loads.clear()
        version, folder = worker.executor.version, worker.executor.weights_folder
        info = replace(
            info_of(worker.executor.shape), identity=self.identity, weights_version=version, weights_folder=folder
        )  # fmt: skip
        self.turn(ev.WorkerJoined(worker=name, info=info, kept=reported_pages(worker.executor)))

    def kill(self) -> None:
        """The process is gone: nothing is written, closed or sent any more."""
        self._stack.close()
        self._died_at = UNIX_TIME + self.now
        if not (self.folder / "journal").exists():
            # The next core knows nothing of this one.
            self.generations.clear()
            self.roots.clear()
        for caller in self.callers:
            # A request that was not accepted, or does not linger, has no promise.
            caller.lost |= not caller.done and (not caller.accepted or not caller.submit.linger_seconds)
        del self.core

    def handle(self, event: ev.Event, **entry: Any) -> list[fx.Effect]:
        effects = self.core.handle(event, self.now)
        if self._session is not None:
            self._session.add(self.now, event, effects, **entry)
        audit(self.core)
        self.keeper.handled(self.now, event, effects)
        return effects

    def turn(self, event: ev.Event) -> None:
        """What the shell does for an event: the core, a Tick, the journal, the effects."""
        effects = [*self.handle(event), *self.handle(ev.Tick())]
        self.keeper.sending(self.now)
        if self.die_unsent:
            raise Died
        self.send(effects)

    def send(self, effects: list[fx.Effect]) -> None:
        by_id = {caller.submit.request_id: caller for caller in self.callers}
        for effect in effects:
            match effect:
                case fx.SendPlan():
                    self.starts += [(len(start.tokens), start.first_position) for start in effect.plan.starts]
                    frame = pb.CoreToWorker.FromString(worker_wire.plan_frame(effect.plan))
                    self.workers[effect.worker].plans.append(frame.plan)
                case fx.LoadWeights():
                    order = pb.CoreToWorker.FromString(worker_wire.frame_of(effect)).load_weights
                    self.workers[effect.worker].loads.append(order)
                case fx.PrepareResource() | fx.DropResource():
                    order, worker = (
                        pb.CoreToWorker.FromString(worker_wire.frame_of(effect)),
                        self.workers[effect.worker],
                    )
                    if isinstance(effect, fx.DropResource):
                        worker.executor.drop(order.drop_constraint)
                    else:
                        worker.executor.prepare(order.prepare_constraint)
                        worker.preparing.append(order.prepare_constraint)
                case fx.WorkerAccepted():
                    self.generations.append(effect.generation)
                    reported = len(self.workers[effect.worker].executor.labels.by_page)
                    self.pages_kept.append(reported if effect.keeps_pages else 0)
                    joined = pb.CoreToWorker.FromString(worker_wire.frame_of(effect)).joined
                    self.workers[effect.worker].executor.joined(joined)
                case fx.Admitted():
                    next(c for c in self.callers if c.stream == effect.stream).accepted = True
                case fx.Rejected():
                    next(c for c in self.callers if c.stream == effect.stream).lost = True
                case fx.Resumed():
                    by_id[effect.request_id].resumed(effect)
                case fx.StepOutput(frontend="f"):
                    for caller in self.callers:
                        if not caller.done:
                            caller.take(effect)
                case _:
                    pass

    # What happens in it ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int = 8,
        num_samples: int = 1,
        linger: float = 60.0,
        seed: int = 0,
        constraint: bytes = b"",
        adapter: bytes = b"",
        **fields: Any,
    ) -> Caller:
        stream, self._next_stream = self._next_stream, self._next_stream + 64
        event = submit(
            stream, prompt, frontend=FRONTEND, request_id=f"r-{stream}", max_new_tokens=max_new_tokens,
            sampling=Settings(temperature=1.0, seed=seed).encoded(), ignore_eos=False, num_samples=num_samples,
            linger_seconds=linger, secret_hash=bytes([7] * 32) if linger else b"", description=b"text options",
            resources=resources_of(constraint, adapter), **hashes_of(prompt, self.shape.page_size),
        )  # fmt: skip
        event = over_the_wire(replace(event, **fields))
        caller = Caller(event, stream, [[] for _ in range(num_samples)], [None] * num_samples)
        self.callers.append(caller)
        self.turn(event)
        return caller

    def update_weights(self, running: Running) -> None:
        self.num_updates += 1
        in_turn = self.random.random() < 0.5
        self.turn(update_weights(self.num_updates, running, frontend=FRONTEND, in_turn=in_turn, max_seconds=60.0))

    def resume(self, caller: Caller) -> None:
        caller.stream, self._next_stream = self._next_stream, self._next_stream + 64
        self.turn(
            ev.Resume(
                frontend=FRONTEND,
                stream=caller.stream,
                request_id=caller.submit.request_id,
                secret_hash=caller.submit.secret_hash,
            )
        )

    def resume_all(self) -> None:
        for caller in self.callers:
            if not caller.done:
                self.resume(caller)

    def step(self, name: str) -> bool:
        """The worker applies a plan or delivers a result. Returns False if it has nothing to do."""
        worker = self.workers[name]
        if worker.plans:
            worker.results.append(worker.executor.apply(worker.plans.popleft()))
        elif worker.results:
            self.now += 0.001
            self.turn(received(name, result=worker.results.popleft()))
        elif worker.loads:
            self.turn(received(name, weights_loaded=worker.executor.load_weights(worker.loads.popleft())))
        elif worker.preparing:
            self.turn(received(name, constraint_ready=worker.executor.constraint_ready(worker.preparing.popleft())))
        else:
            return False
        return True

    def run(self) -> None:
        """Steps all workers until nothing is left to do."""
        while sum(self.step(name) for name in self.workers):
            pass

    def suspend(self) -> None:
        """The disk fails; the journal is removed, and the requests are lost if the scheduler dies now."""
        writer = self.keeper._writer
        assert writer is not None
        # Its line in the log would be one for each such death of a simulation.
        logging.disable(logging.ERROR)
        writer._suspend("cannot be written: Input/output error", self.now)
        logging.disable(logging.NOTSET)
        for caller in self.callers:
            caller.lost |= not caller.done

    def settle(self) -> None:
        """Waits until the journal that is being written aside is in place."""
        writer = self.keeper._writer
        assert writer is not None
        if writer._syncing is not None:
            writer._syncing.join()
        self.turn(ev.Tick())

    def check(self) -> None:
        for worker in self.workers.values():
            assert worker.executor.violations == []
        for caller in self.callers:
            if not caller.lost:
                caller.check(self.shape)
        assert len(set(self.generations)) == len(self.generations)
        assert self.generations == sorted(self.generations)
        assert len(self.roots) == 1

    def close(self) -> None:
        self._stack.close()
