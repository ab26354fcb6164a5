"""The callers of a workload, for engines that run step by step in this process.

Owns when each request is submitted, the times of its tokens, and the result. Knows nothing of an engine.
"""

import time
from collections.abc import Iterator, Sequence

from tests.measure.machine import peak_mb
from tests.measure.result import EngineResult
from tests.measure.workload import Workload


class Callers:
    """Submits a workload's requests and records its tokens. Times count from the creation of this object."""

    def __init__(self, workload: Workload) -> None:
        num_requests = len(workload.prompts)
        self.tokens: list[list[int]] = [[] for _ in range(num_requests)]
        self.times: list[list[float]] = [[] for _ in range(num_requests)]
        self.submitted = [0.0] * num_requests
        self._lengths = workload.output_lengths
        self._may_wait = workload.concurrent if workload.is_closed else num_requests
        self._num_submitted = self._num_ended = 0
        self._begun = time.perf_counter()

    def due(self) -> Iterator[int]:
        """Yields the requests that are submitted now."""
        limit = min(len(self.tokens), self._num_ended + self._may_wait)
        while self._num_submitted < limit:
            self.submitted[self._num_submitted] = time.perf_counter() - self._begun if self._num_ended else 0.0
            self._num_submitted += 1
            yield self._num_submitted - 1

    def take(self, request: int, tokens: Sequence[int]) -> bool:
        """Records new tokens of a request. Returns whether it has all of its tokens."""
        now = time.perf_counter() - self._begun
        self.tokens[request] += tokens
        self.times[request] += [now] * len(tokens)
        has_ended = len(self.tokens[request]) == self._lengths[request]
        self._num_ended += has_ended
        return has_ended

    @property
    def are_done(self) -> bool:
        return self._num_ended == len(self.tokens)

    def result(self, engine: str, note: str, cpu_seconds: float) -> EngineResult:
        return EngineResult(
            engine=engine,
            note=note,
            seconds=max(times[-1] for times in self.times),
            tokens=self.tokens,
            times=self.times,
            submitted=self.submitted,
            engine_cpu_seconds=cpu_seconds,
            peak_mb={"engine": peak_mb()},
        )
