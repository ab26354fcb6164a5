"""A worker that keeps its plans, and replays them once it gets the signal to stop.

`python -m tests.measure.serving.recording_worker [--profile] -- FLAGS` is `gpu_worker FLAGS`. After
SIGTERM the same warm runner executes the same frames again without sockets: what the worker alone would take, in the
same process and memory, on the same core. Owns the recording; prints one JSON object.
"""

import json
import os
import sys
import time
from typing import Any

from tandem.internal.v1 import worker_pb2 as pb

import gpu_worker.link.link as link_module
from gpu_worker.__main__ import main as run_worker
from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import Outcome
from tests.measure.serving import replay, step_profile


class RecordedRunner:
    """Passes every call on to a runner; keeps plans, results and times."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.plans: list[pb.StepPlan] = []
        self.outcomes: list[Outcome] = []
        self.spans: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, message: pb.StepPlan) -> None:
        begun = time.perf_counter()
        self.runner.submit(message)
        self.spans.append((begun, time.perf_counter()))
        self.plans.append(message)

    def collect(self, *, wait: bool = True) -> Outcome | None:
        outcome = self.runner.collect(wait=wait)
        if outcome is not None:
            self.outcomes.append(outcome)
        return outcome


def report(recorded: RecordedRunner, profiled: bool) -> dict[str, Any]:
    """Replays the plans. Returns the times of every step: (begin, end) in seconds of the monotonic clock."""
    recording = replay.Recording.of(recorded.plans, recorded.outcomes)
    spans = replay.run(recorded.runner, recording)
    found: dict[str, Any] = {"recorded_worker": True, "recorded": recorded.spans, "replayed": spans}
    if profiled:
        found["profile"] = step_profile.measure(recorded.runner, recording, spans)
    return found


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    profiled = "--profile" in arguments[:at]
    if profiled:
        step_profile.trace_kernels()

    class RecordingLink(link_module.Link):
        def __init__(self, endpoint: str, join: pb.Join, runner: Runner, **options: Any) -> None:
            self._recorded = RecordedRunner(runner)
            super().__init__(endpoint, join, self._recorded, **options)

        def serve(self) -> None:
            super().serve()
            print(json.dumps(report(self._recorded, profiled)), flush=True)

    link_module.Link = RecordingLink
    return run_worker(arguments[at + 1 :])


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    os._exit(exit_code)
