"""A fleet with workers that load new weights: each token is the oracle's of the version that its stream's end names."""

import random
from typing import Any

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights
from scheduler_svc.core.messages.reports import WeightsReport
from tests.rigs.executor import Executor, Shape
from tests.rigs.oracle import next_token
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.stream import Stream, settings_of
from tests.scheduler_svc.core.world import FRONTEND

ROOT = "/weights"


class UpdatedFleet(Fleet):
    """Each worker has one message of the core in a step, and the core one of each worker."""

    def __init__(self, *, num_workers: int = 1, seed: int = 0, **config: Any) -> None:
        super().__init__(config=CoreConfig(prove_workers=True, weights_folders=(ROOT,), **config))
        self.shape = Shape(num_pages=60, max_rows=8, host_pages=8, page_copy_us=1.0, token_us=50.0)
        self.rng, self.num_updates = random.Random(seed), 0
        for _ in range(num_workers):
            self.start()

    def _take(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.LoadWeights):
            assert not self.core.lanes[effect.worker].in_flight, "weights are loaded while a plan is in flight"
        super()._take(effect)
        assert not isinstance(effect, fx.Rejected), effect

    @property
    def reports(self) -> list[WeightsReport]:
        return self.told(WeightsReport)

    @property
    def notes(self) -> list[str]:
        return [note.message for note in self.told(fx.Note)]

    def versions(self) -> dict[str, str]:
        """The version of each worker."""
        return {name: worker.executor.version for name, worker in self.workers.items()}

    # Moves -----------------------------------------------------------------------------------------------------------

    def start(self, *, is_standby: bool = False, executor: Executor | None = None) -> str:
        """Lets another worker join and returns its name. Its tokens depend on its weights."""
        return self.join_as(self.shape, is_standby=is_standby, executor=executor or Executor(self.shape))

    def ask(self, prompt: list[int], *, max_new_tokens: int = 8, **options: Any) -> Stream:
        """Submits a request with a seed of its own and returns its first stream."""
        settings = {"temperature": 1.0, "seed": (len(self.streams) + 1) % 7, "ignore_eos": True}
        return self.streams[self.submit(prompt, max_new_tokens=max_new_tokens, **settings, **options)]

    def update(
        self, version: str, running: Running = Running.RECOMPUTE, *, in_turn: bool = False, max_seconds: float = 600.0
    ) -> None:
        """An operator lets all workers load the version."""
        self.num_updates += 1
        weights = Weights(version=version, folder=f"{ROOT}/{version}")
        self.handle(
            UpdateWeights(
                frontend=FRONTEND,
                query=self.num_updates,
                weights=weights,
                running=running,
                in_turn=in_turn,
                max_seconds=max_seconds,
            )
        )

    def tick(self, seconds: float = 0.001) -> list[fx.Effect]:
        """Advances the clock, then lets the core plan."""
        return super().tick(seconds)

    def turn(self, name: str) -> bool:
        """The worker handles one message, and the core one of its own. Returns False if there was none."""
        return self.workers[name].work() | self.deliver_from(name)

    def step(self, seconds: float = 0.001) -> None:
        """Ticks, then each worker has its turn."""
        self.tick(seconds)
        for name in list(self.workers):
            self.turn(name)

    def run_until_loading(self) -> str:
        """Steps until a worker has an order to load and has not begun; returns its name."""
        while True:
            self.tick()
            for name, lane in self.core.lanes.items():
                if lane.phases.is_loading:
                    return name
            for name in self.workers:
                self.turn(name)

    def run(self, max_steps: int = 20_000) -> None:
        """Steps until nothing is left to do."""
        idle = 0
        for _ in range(max_steps):
            self.tick()
            idle = 0 if sum(map(self.turn, list(self.workers))) else idle + 1
            if idle > 3:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def check(self, *streams: Stream) -> None:
        """Asserts that each token is the oracle's of its version. Not for streams that continued with old pages."""
        for stream in streams:
            self._check(stream)

    def _check(self, stream: Stream) -> None:
        prompt, settings = stream.submit.prompt.tolist(), settings_of(stream.submit, 0)
        for n, (token, version) in enumerate(zip(stream.tokens, stream.versions(), strict=True)):
            known = [*prompt, *stream.tokens[:n]]
            expected = next_token(
                known, num_prompt=len(prompt), settings=settings, vocab=self.shape.sampled_vocab, version=version
            )
            assert token == expected, f"{stream.submit.request_id}: token {n} is not that of version {version!r}"
