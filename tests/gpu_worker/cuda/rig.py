"""A small random model behind a runner with padded steps, which the recorder captures and replays on a CPU.

A scenario is a function that runs steps in a `Session`. It can run with graphs and without, on the same kernels.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.checkpoint.loading import prepare
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.cuda.graphs import CapturedSteps
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.step.runner import Runner
from tests.gpu_worker.plans import Sequence_, TinyCore, geometry_of
from tests.gpu_worker.reference import eager_model
from tests.gpu_worker.rig import VOCAB_SIZE, RigSpec, config_of
from tests.rigs.graph_recorder import GraphRecorder
from tests.rigs.padded_shapes import padded_runner
from tests.rigs.plain_flex import plain_flex
from tests.rigs.recorded_worker import recorder

CPU = torch.device("cpu")
SPEC = RigSpec(page_size=16, group=2, head_dim=64, chunk_align=32)
# Decode buckets 1, 2 and 3.
GEOMETRY = geometry_of(num_pages=40, max_rows=3, max_length=128, token_budget=96, chunk_align=32, vocab_size=VOCAB_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a step gave: its tokens, and the logits of the rows that sampled; none if more steps were in flight."""

    tokens: list[int]
    logits: Tensor | None


class StepFailed(AssertionError):
    """The runner answered that a step failed."""


class Session:
    """Runs the steps of a scenario."""

    def __init__(self, runner: Runner, core: TinyCore) -> None:
        self._runner, self.core = runner, core
        self._sampled: deque[list[int]] = deque()
        self.observed: list[Observed] = []

    def add(self, row: int, length: int, **sampling: float) -> Sequence_:
        """A sequence with a prompt of its own."""
        return self.core.add(row, [(7 * row + i * i) % VOCAB_SIZE for i in range(length)], **sampling)

    def rejoin(self, sequence: Sequence_, row: int) -> Sequence_:
        """Preempts a sequence, and starts it again in another row, with other pages."""
        self.core.free(sequence)
        return self.core.add(row, sequence.tokens, num_prompt=sequence.num_prompt, **sequence.sampling)

    def step(self, *, chunks: Mapping[int, int] | None = None, decode: Sequence[int] = ()) -> None:
        """Runs one step."""
        self.submit(chunks=chunks, decode=decode)
        self.collect()

    def submit(self, *, chunks: Mapping[int, int] | None = None, decode: Sequence[int] = ()) -> None:
        """Enqueues one step."""
        message = self.core.plan(chunks=dict(chunks or {}), decode=decode)
        self._sampled.append(self.core.sampled)
        self._runner.submit(message)

    def collect(self) -> None:
        """Takes the outcome of the oldest step."""
        outcome, sampled = self._runner.collect(), self._sampled.popleft()
        assert outcome is not None
        if outcome.status != pb.STEP_STATUS_OK or outcome.nonfinite.size or len(outcome.tokens) != len(sampled):
            raise StepFailed(f"status {outcome.status} {outcome.detail}, nonfinite {outcome.nonfinite}")
        self.core.learn(outcome.tokens.tolist(), sampled)
        logits = self._runner.on_device.last_logits
        has_logits = logits is not None and bool(sampled) and not self._sampled
        self.observed.append(
            Observed(tokens=outcome.tokens.tolist(), logits=logits[: len(sampled)].clone() if has_logits else None)
        )


Scenario = Callable[[Session], None]


class GraphRig:
    """One runner, with plain attention for every shape."""

    def __init__(self) -> None:
        register()
        model = eager_model(config_of(SPEC), seed=7)
        model.set_attn_implementation(ATTENTION_NAME)
        layers = check_model(meta_model_of(config_of(SPEC), dtype=torch.float32))
        model = prepare(model, device=CPU, dtype=torch.float32)
        with plain_flex():
            self.runner = padded_runner(
                model, layers, GEOMETRY, device=CPU, dtype=torch.float32, shapes=Shapes.of(GEOMETRY), graphs=recorder()
            )
        self.runner.warm_up()
        self._generation = 0

    @property
    def graphs(self) -> CapturedSteps:
        return self.runner.steps.graphs

    def capture(self) -> GraphRecorder:
        """Captures every shape again, as the code is now."""
        self.runner.reset(0)
        backend = recorder()
        self.runner.steps.graphs = CapturedSteps(backend)
        for shape in reversed(self.runner.steps.shapes.steps):
            self.runner.steps.warm_up(shape)
        return backend

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Within it, every step runs eagerly."""
        captured = self.runner.steps.graphs
        self.runner.steps.graphs = CapturedSteps(None)
        yield
        self.runner.steps.graphs = captured

    def observed(self, scenario: Scenario) -> list[Observed]:
        """Runs a scenario. Raises StepFailed."""
        while self.runner.collect() is not None:
            pass
        self._generation += 1
        session = Session(self.runner, TinyCore(GEOMETRY, generation=self._generation))
        scenario(session)
        return session.observed

    def flaw(self, scenario: Scenario, truth: Sequence[Observed]) -> str:
        """Runs a scenario with graphs; returns what shows that they are wrong, or an empty text."""
        if self.graphs.num_graphs < len(self.runner.steps.shapes.steps):
            return "a shape was not captured"
        try:
            observed = self.observed(scenario)
        except StepFailed as error:
            return f"a step failed: {error}"
        for i, (ours, expected) in enumerate(zip(observed, truth, strict=True)):
            if ours.tokens != expected.tokens:
                return f"step {i} has other tokens: {ours.tokens}, not {expected.tokens}"
            if expected.logits is not None and not torch.equal(ours.logits, expected.logits):
                return f"step {i} has other logits"
        return ""
