"""Recorded plans, executed again by a runner without a scheduler or sockets.

Owns the comparison of results: a replay that computes other tokens than the recorded run fails.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import Outcome, parse_frame, result_frame

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The plans of one session as frames, and the tokens of each."""

    generation: int
    frames: list[bytes]
    tokens: list[list[int]]

    @classmethod
    def of(cls, plans: Sequence[pb.StepPlan], outcomes: Sequence[Outcome]) -> "Recording":
        """Raises AssertionError if the session had several generations or a plan without a result."""
        generations = {plan.generation for plan in plans}
        assert len(generations) == 1, f"the lane was reset: generations {sorted(generations)}"
        assert len(plans) == len(outcomes)
        return cls(
            generation=generations.pop(),
            frames=[pb.CoreToWorker(plan=plan).SerializeToString() for plan in plans],
            tokens=[outcome.tokens.tolist() for outcome in outcomes],
        )


def step(runner: Runner, frame: bytes) -> Outcome:
    """What a worker does with one frame, without its socket."""
    runner.submit(parse_frame(frame).plan)
    outcome = runner.collect()
    assert outcome is not None
    result_frame(outcome)
    return outcome


def run(runner: Runner, recording: Recording) -> list[Span]:
    """Returns the begin and the end of each step."""
    runner.join(pb.Joined(generation=recording.generation))
    spans: list[Span] = []
    outcomes: list[Outcome] = []
    for frame in recording.frames:
        begun = time.perf_counter()
        outcomes.append(step(runner, frame))
        spans.append((begun, time.perf_counter()))
    for i, (outcome, tokens) in enumerate(zip(outcomes, recording.tokens, strict=True)):
        assert np.array_equal(outcome.tokens, tokens), f"step {i + 1} of the replay sampled other tokens"
    return spans
