"""How large the steps of a lane may be so that its worker does not run out of memory.

A step that runs out of memory is answered by a smaller one: first the token budget halves, down to one aligned chunk;
then the number of rows halves; then a request runs alone; then it ends. Each reduction is half of the failed step, so
that a worker of any capacity is matched after O(log(token budget) + log(rows)) failures. Confirmed steps raise the
limits again. The number of steps between two raises doubles with each failure after a raise, so that a permanent limit
costs O(log steps) failures.
"""

from enum import StrEnum

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.messages.worker_info import WorkerInfo

FIRST_RECOVERY_STEPS, LAST_RECOVERY_STEPS = 32, 8192
"""Confirmed steps before a limit is raised by half: at first, and at most."""
_MAX_REMEMBERED = 64


class Reduction(StrEnum):
    """What follows a step that ran out of memory."""

    SMALLER_STEP = "smaller step"
    FEWER_ROWS = "fewer rows"
    ALONE = "alone"
    """The request ran alone in the smallest step. It may do so once more."""
    ENDED = "ended"
    """The request ran out of memory alone again, so it ends."""
    REFUSED = "refused"
    """Another request ended for the same reason and no step was confirmed since, so the worker is at fault."""


class MemoryLimit:
    """The limits of one lane. They are those of the worker until a step runs out of memory."""

    def __init__(self, info: WorkerInfo) -> None:
        self._most_tokens, self._most_rows, self._align = info.token_budget, info.max_rows, info.chunk_align
        self.token_budget = info.token_budget
        """Largest cost of a step, as `WorkerInfo.token_budget`. Decode rows may exceed it, chunks never."""
        self.max_rows = info.max_rows
        """Largest number of rows."""
        self._recovery_steps = FIRST_RECOVERY_STEPS
        self._num_confirmed = 0
        self._has_raised = False
        self._has_ended_one = False
        # Handles of requests that ran out of memory alone, and have not sampled since.
        self._failed_alone: set[int] = set()

    def ran_out(self, record: SentPlan) -> Reduction:
        """Lowers a limit after a step that ran out of memory. The caller carries out the returned reduction."""
        self._num_confirmed = 0
        if self._has_raised:
            self._has_raised = False
            self._recovery_steps = min(2 * self._recovery_steps, LAST_RECOVERY_STEPS)
        positions = record.prefill_tokens + record.decode_tokens
        budget = max(self._align, positions // 2)
        if record.prefill_tokens and positions > self._align and budget < self.token_budget:
            self.token_budget = budget
            return Reduction.SMALLER_STEP
        if len(record.rows) > 1:
            self.max_rows = len(record.rows) // 2
            return Reduction.FEWER_ROWS
        return self._failed_by(int(record.handles[0]))

    def _failed_by(self, handle: int) -> Reduction:
        if handle not in self._failed_alone:
            if len(self._failed_alone) >= _MAX_REMEMBERED:
                self._failed_alone.clear()
            self._failed_alone.add(handle)
            return Reduction.ALONE
        if self._has_ended_one:
            return Reduction.REFUSED
        self._failed_alone.discard(handle)
        self._has_ended_one = True
        return Reduction.ENDED

    def confirmed(self, record: SentPlan) -> None:
        """Counts a confirmed step, and raises a limit after enough of them."""
        self._has_ended_one = False
        if self._failed_alone:
            self._failed_alone.difference_update(record.handles[record.sampled].tolist())
        if self.token_budget == self._most_tokens and self.max_rows == self._most_rows:
            return
        self._num_confirmed += 1
        if self._num_confirmed < self._recovery_steps:
            return
        self._num_confirmed = 0
        self._has_raised = True
        # Rows first: without them a larger budget is of no use to waiting requests.
        if self.max_rows < self._most_rows:
            self.max_rows = min(self._most_rows, self.max_rows + -(-self.max_rows // 2))
        else:
            self.token_budget = min(self._most_tokens, self.token_budget + -(-self.token_budget // 2))

    def limits(self) -> str:
        """Returns the limits and those of the worker as words for a message."""
        return (
            f"the token budget is {self.token_budget:,} of {self._most_tokens:,} and "
            f"the rows are {self.max_rows:,} of {self._most_rows:,}"
        )
