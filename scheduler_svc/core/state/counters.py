"""Counters of the core since its start. The plan builder and the lanes update them for the load report."""


class Counters:
    """All counters start at zero and only increase."""

    def __init__(self) -> None:
        self.steps = 0
        """Confirmed steps."""
        self.preemptions = 0
        self.resets = 0
        """Lane resets. The loss of a worker counts as one."""
        self.prompt_tokens = 0
        """Prompt tokens of all requests that have had a row."""
        self.cached_prompt_tokens = 0
        """Number of `prompt_tokens` that were found in the prefix cache."""

    def step_confirmed(self) -> None:
        """Counts a confirmed step."""
        self.steps += 1

    def preempted(self) -> None:
        """Counts a preemption."""
        self.preemptions += 1

    def lane_reset(self) -> None:
        """Counts a lane reset."""
        self.resets += 1

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a request that got its first row. `cached_tokens` of its prompt were in the prefix cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached_tokens
