"""Counters of the core since its start. The plan builder and the lanes count."""

from collections import deque
from statistics import median

from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.state.memory_limit import Reduction

_RECENT_STEPS = 64


class Counters:
    """All counters start at zero and only increase; and the times of the last steps."""

    def __init__(self) -> None:
        self.steps = 0
        """Confirmed steps."""
        self.preemptions = 0
        self.resets_by_cause = dict.fromkeys(ResetCause, 0)
        """Lane resets. The loss of a worker counts as one."""
        self.hung_workers = 0
        """Workers that were given up because a step took too long or because they were silent."""
        self.memory_reductions = dict.fromkeys(Reduction, 0)
        """How often a step that ran out of memory led to each reduction."""
        self.prompt_tokens = 0
        """Prompt tokens of all requests that have had a row."""
        self.cached_prompt_tokens = 0
        """Number of `prompt_tokens` that were found in the prefix cache."""
        self.output_tokens = 0
        """Tokens that steps have emitted."""
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step_confirmed(self, seconds: float, output_tokens: int) -> None:
        """Counts a confirmed step with a result that was read `seconds` after its plan was sent."""
        self.steps += 1
        self.output_tokens += output_tokens
        self._step_seconds.append(seconds)

    @property
    def step_ms(self) -> float:
        """Median time of the last steps from sending the plan to reading the result, in ms; 0 before the first."""
        return 1e3 * median(self._step_seconds) if self._step_seconds else 0.0

    @property
    def resets(self) -> int:
        return sum(self.resets_by_cause.values())

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a request that got its first row. `cached_tokens` of its prompt were in the prefix cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached_tokens
