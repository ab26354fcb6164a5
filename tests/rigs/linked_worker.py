"""The real link of a worker around the content-checking executor: `python -m tests.rigs.linked_worker FLAGS`.

The flags are the checking worker's. It prints `joined generation=N` for each session. A step takes --step-ms, or no
time once --fast-file exists; the link goes on meanwhile, as with a device. New weights are loaded while --slow-file
exists, in which the link does not go on.
Owns the queue of results.
"""

import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.link.connection import read_keys
from gpu_worker.link.link import Link
from gpu_worker.wire.frames import Outcome
from tandem_contract import logs, stopping
from tandem_contract.child import die_with_parent
from tandem_contract.files import WORKER_SOCKET, KeyFile, endpoint_of
from tests.rigs import checking_worker
from tests.rigs.executor import Executor

MAX_IN_FLIGHT = 2
_PAUSE_SECONDS = 0.002


class Weights:
    """Loads weights, and prints it."""

    def __init__(self, executor: Executor, slow_file: Path | None) -> None:
        self._executor, self._slow_file = executor, slow_file

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        print(f"loading {order.version}", flush=True)
        while self._slow_file is not None and self._slow_file.exists():
            time.sleep(0.01)
        return self._executor.load_weights(order)


class ExecutorRunner:
    """A runner with results that are due some time after their plans."""

    constraints = None

    def __init__(self, executor: Executor, step_seconds: float, slow_file: Path | None, fast_file: Path | None) -> None:
        self._executor = executor
        self.weights = Weights(executor, slow_file)
        self._step_seconds, self._fast_file = step_seconds, fast_file
        self._results: deque[tuple[float, pb.StepResult]] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def report_pages(self, join: pb.Join) -> None:
        self._executor.report_pages(join)

    def join(self, message: pb.Joined) -> None:
        self._executor.joined(message)
        print(f"joined generation={message.generation}", flush=True)

    def submit(self, message: pb.StepPlan) -> None:
        before = self._results[-1][0] if self._results else time.monotonic()
        if self._fast_file is not None and self._fast_file.exists():
            self._step_seconds = 0.0
        due = max(before, time.monotonic()) + self._step_seconds
        self._results.append((due, self._executor.apply(message)))

    def collect(self, *, wait: bool = True) -> Outcome | None:
        if not self._results:
            return None
        if not wait and time.monotonic() < self._results[0][0]:
            # The link looks without a pause for a step that may end at once.
            time.sleep(_PAUSE_SECONDS)
            return None
        _, result = self._results.popleft()
        assert not result.HasField("logprobs") and not result.HasField("prompt_logprobs")
        return Outcome(
            generation=result.generation,
            step=result.step,
            status=result.status,
            detail=result.detail,
            tokens=np.frombuffer(result.tokens, "<i4"),
            nonfinite=np.frombuffer(result.nonfinite, "<i4"),
        )


def main(arguments: list[str]) -> int:
    stopping.begin()
    args = checking_worker.parse(arguments)
    if args.exit_with_parent:
        die_with_parent()
    logs.start("worker", level="info", log_format="text", package="gpu_worker")
    executor = Executor(checking_worker.shape_of(args), on_violation=partial(checking_worker.violated, args.violations))
    runner = ExecutorRunner(executor, args.step_ms / 1e3, args.slow_file, args.fast_file)
    curve = read_keys(args.keys, args.connect) if args.connect else None
    link = Link(
        args.connect or endpoint_of(Path(args.runtime_dir), WORKER_SOCKET),
        checking_worker.join_message(args),
        runner,
        key=None if args.connect else KeyFile(Path(args.runtime_dir)),
        max_in_flight=MAX_IN_FLIGHT,
        curve=curve,
    )
    try:
        link.serve()
    finally:
        logs.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
