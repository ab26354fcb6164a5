"""Constraints and constrained rows as the worker knows them, and how far the mask server has followed them.

Owns this state. Knows nothing of the server's process.
"""

from dataclasses import dataclass, field

from gpu_worker.constraints.frames import Fate


@dataclass(slots=True, kw_only=True, eq=False)
class ConstrainedRow:
    """One start of a row; the same row started again is another object."""

    row: int
    # Numbers the starts.
    start: int
    constraint: "Prepared"
    # Output tokens, which are in the shared memory.
    num_tokens: int
    fate: Fate = Fate.OPEN
    # Why it failed.
    detail: str = ""
    # With how many output tokens the present server was asked for a mask, has taken them, and has computed the mask.
    asked: int = -1
    taken: int = -1
    masked: int = -1
    # Servers that ended while they computed this mask.
    num_deaths: int = 0

    def fail(self, detail: str) -> None:
        if self.fate is not Fate.FAILED:
            self.fate, self.detail = Fate.FAILED, detail

    def end(self) -> None:
        """No token follows that means anything."""
        if self.fate is Fate.OPEN:
            self.fate = Fate.ENDED

    @property
    def is_taken(self) -> bool:
        """Whether its fate after the newest token is known."""
        return self.fate is not Fate.OPEN or self.taken == self.num_tokens

    @property
    def is_masked(self) -> bool:
        """Whether its next token can be sampled."""
        return self.fate is not Fate.OPEN or self.masked == self.num_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """A constraint that the scheduler has sent."""

    # Numbers the constraints of a worker.
    id: int
    hash: bytes
    source: bytes
    # Whether the present server has it, or will before any later frame.
    is_defined: bool = False
    # Whether the scheduler has had its answer.
    is_answered: bool = False
    num_deaths: int = 0


@dataclass(slots=True, kw_only=True)
class Registry:
    """The constraints that the scheduler has sent and not dropped, and the rows that run."""

    by_hash: dict[bytes, Prepared] = field(default_factory=dict)
    by_id: dict[int, Prepared] = field(default_factory=dict)
    rows: dict[int, ConstrainedRow] = field(default_factory=dict)
    # Hashes of constraints that became ready, or why they cannot be used.
    answers: list[tuple[bytes, str]] = field(default_factory=list)

    def unanswered(self) -> list[Prepared]:
        """The constraints that the scheduler waits for, in the order of their ids."""
        return [constraint for constraint in self.by_id.values() if not constraint.is_answered]

    def fail(self, culprit: ConstrainedRow | Prepared, reason: str) -> None:
        """A row, or a constraint with all of its rows, ends with this reason."""
        if isinstance(culprit, ConstrainedRow):
            culprit.fail(reason)
        else:
            self.remove(culprit, reason)

    def remove(self, constraint: Prepared, reason: str) -> None:
        """Forgets a constraint. The scheduler gets the reason if it waits for the answer; otherwise its rows fail."""
        del self.by_id[constraint.id], self.by_hash[constraint.hash]
        if not constraint.is_answered:
            self.answers.append((constraint.hash, reason))
        for row in self.rows.values():
            if row.constraint is constraint:
                row.fail(reason)

    def forget_server(self) -> None:
        """Another server follows, which knows nothing."""
        for constraint in self.by_id.values():
            constraint.is_defined = False
        for row in self.rows.values():
            row.asked = row.taken = row.masked = -1
