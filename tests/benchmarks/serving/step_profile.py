"""Where the time of a step goes, from torch's profiler on replayed plans."""

from typing import Any

from gpu_worker.step.runner import Runner
from tests.benchmarks.serving.replay import Recording


def measure(runner: Runner, recording: Recording) -> dict[str, Any]:
    raise NotImplementedError
