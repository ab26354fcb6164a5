"""Counters of the core since its start. The plan builder and the lanes update them for the load report."""

from scheduler_svc.core.limits.memory_limit import Reduction
from scheduler_svc.core.messages.reports import ResetCause


class Counters:
    """All counters start at zero and only increase."""

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

    def step_confirmed(self) -> None:
        """Counts a confirmed step."""
        self.steps += 1

    @property
    def resets(self) -> int:
        """Number of lane resets."""
        return sum(self.resets_by_cause.values())

    def preempted(self) -> None:
        """Counts a preemption."""
        self.preemptions += 1

    def lane_reset(self, cause: ResetCause) -> None:
        """Counts a lane reset."""
        self.resets_by_cause[cause] += 1

    def worker_hung(self) -> None:
        """Counts a worker that was given up."""
        self.hung_workers += 1

    def memory_reduced(self, reduction: Reduction) -> None:
        """Counts what followed a step that ran out of memory."""
        self.memory_reductions[reduction] += 1

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a request that got its first row. `cached_tokens` of its prompt were in the prefix cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached_tokens
