"""Counts of the core since its start.

Owns the counters. `plan_builder` and `lanes` report what happened; the load report reads them.
"""


class Counters:
    """All zero at the start."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps whose result was confirmed."""
        self.preemptions = 0
        self.resets = 0
        """Resets of a lane, the losses of workers included."""
        self.prompt_tokens = 0
        """Prompt tokens of all requests that were admitted to a row."""
        self.cached_prompt_tokens = 0
        """Prompt tokens that were found in the prefix cache."""

    def step_confirmed(self) -> None:
        """A step's result was confirmed."""
        self.steps += 1

    def preempted(self) -> None:
        """A running request lost its row to another."""
        self.preemptions += 1

    def lane_reset(self) -> None:
        """A lane was reset."""
        self.resets += 1

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request got its first row; `cached_tokens` of its prompt were in the prefix cache."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached_tokens
