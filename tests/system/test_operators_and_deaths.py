"""Drains of workers and updates of weights while workers, front ends and the scheduler are killed at random.

Each request has one end, each token is that of the version which the end names, and each operator hears the truth.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem_client import Client
from tandem_client.errors import TandemError
from tandem_client.types import DrainState, UpdateState
from tests.rigs import byte_tokenizer
from tests.rigs.oracle import complete
from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.restarting import RestartingWorkers
from tests.rigs.sampling import Settings
from tests.rigs.waiting import LINGER_SECONDS, TIMEOUT_SECONDS

SHAPE = (
    *("--page-size", "8", "--num-pages", "600", "--max-rows", "16", "--max-length", "512"),
    *("--token-budget", "96", "--step-ms", "4"),
)
NUM_WORKERS, NUM_CALLERS, NUM_OPERATORS = 3, 12, 3
# Of the whole run: enough deaths and operations that each kind of end of an operation comes.
NUM_EVENTS = 60


class Service:
    """Two front ends, a journal, workers that are started again, and everything that callers and operators do."""

    def __init__(self, rig: Rig, folder: Path, seed: int, workers: RestartingWorkers) -> None:
        self.rig, self.folder, self.rng, self.workers = rig, folder, random.Random(seed), workers
        self.flags = (
            *("--frontends", "2", "--journal", str(rig.runtime_dir / "journal"), "--weights-folders", str(folder)),
            *("--silence-timeout-seconds", "3", "--step-timeout-seconds", "3"),
        )
        self.scheduler: SchedulerProcess = rig.scheduler(*self.flags)
        self.address = self.scheduler.address
        self.seen: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.stop = threading.Event()
        self.num_updates = 0
        self.operators: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """Works in a thread; a failure ends the run."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.failures.append(error)
                self.stop.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def call(self, number: int) -> None:
        """A caller that sends one request after another, and continues streams that break."""
        rng = random.Random(number)
        with Client(self.address) as client:
            while not self.stop.is_set():
                prompt = [*(rng.randrange(256) for _ in range(rng.randint(1, 30))), ord("a")]
                count, seed, tokens = rng.randint(20, 150), rng.randrange(1 << 40), list[int]()
                stream = client.generate(
                    prompt,
                    max_new_tokens=count,
                    ignore_eos=True,
                    temperature=0.7,
                    seed=seed,
                    resume=True,
                    linger_seconds=LINGER_SECONDS,
                )
                is_refused = False
                try:
                    for delta in stream:
                        assert delta.token_offset == len(tokens), "a token is missing or came twice"
                        tokens += delta.token_ids
                except TandemError:
                    is_refused = True
                if is_refused:
                    # No front end, or none that knows a worker yet.
                    assert not tokens, f"a stream ended after {len(tokens)} of {count} tokens"
                    self.seen["refused"] += 1
                    self.stop.wait(0.2)
                    continue
                assert stream.summary is not None and stream.finished is not None
                spans = stream.summary.weights
                expected = complete(
                    prompt, max_new_tokens=len(tokens), vocab=byte_tokenizer.NUM_DRAWN, ignore_eos=True,
                    settings=Settings(temperature=0.7, seed=seed),
                    version_of=lambda n, spans=spans: next(
                        (span.version for span in reversed(spans) if span.from_token <= n), ""
                    ),
                )  # fmt: skip
                assert tuple(tokens) == expected.tokens
                assert stream.finished.reason == "aborted" or len(tokens) == count
                self.seen[f"end: {stream.finished.reason}"] += 1

    def drain(self, max_seconds: float) -> None:
        """An operator drains a worker. If the answer says that it has ended, it has."""
        with Client(self.address, max_retries=0) as client:
            try:
                pids = [worker.pid for worker in client.load(timeout=TIMEOUT_SECONDS).per_worker]
                if not pids:
                    return
                worker = psutil.Process(pids[0])
                state = [each.state for each in client.drain(str(worker.pid), max_seconds=max_seconds, timeout=60)][-1]
            except (TandemError, psutil.NoSuchProcess):
                self.seen["drain: failed"] += 1
                return
        self.seen[f"drain: {state}"] += 1
        if state == DrainState.DONE:
            worker.wait(30)

    def update(self, running: str, in_turn: bool, max_seconds: float) -> None:
        """An operator updates the weights. If its update is done, the service has these or later ones."""
        self.num_updates += 1
        folder = self.folder / f"v{self.num_updates}"
        folder.mkdir()
        with Client(self.address, max_retries=0) as client:
            try:
                updates = client.update_weights(
                    folder, version=folder.name, running=running, in_turn=in_turn, max_seconds=max_seconds, timeout=60
                )
                state = [each.state for each in updates][-1]
                version = client.load(timeout=TIMEOUT_SECONDS).weights_version
            except TandemError:
                self.seen["update: failed"] += 1
                return
        self.seen[f"update: {state}"] += 1
        # Another operator may have gone on.
        assert state != UpdateState.DONE or version >= folder.name or len(version) > len(folder.name)

    def kill_frontend(self) -> None:
        found = psutil.Process(self.scheduler.pid).children()
        if len(found) == 2:
            self.rng.choice(found).kill()
            self.seen["front end killed"] += 1

    def kill_worker(self) -> None:
        if live := self.workers.live:
            worker = self.rng.choice(live)
            worker.killed = True
            os.kill(worker.pid, 9)
            self.seen["worker killed"] += 1

    def kill_scheduler(self) -> None:
        self.scheduler.kill_with_frontends()
        self.scheduler = self.rig.scheduler(*self.flags, listen=self.address)
        self.seen["scheduler killed"] += 1

    def operate(self) -> None:
        self.operators = [each for each in self.operators if each.is_alive()]
        if len(self.operators) == NUM_OPERATORS:
            return
        rng, seconds = self.rng, self.rng.choice([0.0, 0.2, 3.0, 20.0])
        running, in_turn = rng.choice(["recompute", "finish", "abort"]), rng.random() < 0.4
        work = rng.choice([lambda: self.drain(seconds), lambda: self.update(running, in_turn, seconds)])
        self.operators.append(self.start(work))

    def settle(self) -> None:
        """All callers and operators end; then the service is idle, with as many workers, all of the same version."""
        self.stop.set()
        for thread in [*self.operators, *self.callers]:
            thread.join(90)
            assert not thread.is_alive(), "an operator or a caller waits for ever"
        if self.failures:
            raise self.failures[0]
        caller = self.rig.ready_caller(self.scheduler)
        load = caller.wait_load(
            lambda load: (
                len(load.per_worker) == NUM_WORKERS
                and {worker.weights_version for worker in load.per_worker} == {load.weights_version}
                and not any(worker.is_draining for worker in load.per_worker)
            )
        )
        caller.wait_idle()
        assert load.workers == NUM_WORKERS

    def run(self) -> None:
        with Client(self.address) as client:
            client.wait_ready(TIMEOUT_SECONDS)
        self.callers = [self.start(lambda number=number: self.call(number)) for number in range(NUM_CALLERS)]
        moves = [self.operate, self.operate, self.operate, self.kill_worker, self.kill_frontend]
        for number in range(NUM_EVENTS):
            if self.stop.wait(self.rng.expovariate(2.5)):
                break
            self.kill_scheduler() if number % 20 == 10 else self.rng.choice(moves)()
        self.settle()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_operators_are_told_the_truth_whoever_dies(tmp_path: Path, seed: int) -> None:
    with Rig() as rig, RestartingWorkers(rig, SHAPE, count=NUM_WORKERS, pause_seconds=0.3) as workers:
        service = Service(rig, tmp_path, seed, workers)
        service.run()
        print(service.seen)
        for kind in ("drain: done", "update: done", "end: length", "scheduler killed", "worker killed"):
            assert service.seen[kind], service.seen
