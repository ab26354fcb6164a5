"""The constraints of a worker, as its steps use them: what the scheduler has sent, the rows that run, their masks.

Owns the order of events: a row starts, its masks are asked for, its tokens are learned. Knows nothing of plans or
torch, and leaves processes and limits to `supervisor.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from gpu_worker.constraints.frames import MAX_NUMBER, Sizes
from gpu_worker.constraints.rows import ConstrainedRow, Fate, Prepared, Registry
from gpu_worker.constraints.supervisor import ServerProcess, Supervisor
from gpu_worker.constraints.watch import DEFAULT_LIMITS, Limits


def refusal(tokenizer_json: bytes) -> str:
    """Why the worker takes no constraints, in one sentence; empty if it takes them."""
    if not tokenizer_json:
        return "the model has no tokenizer, and constraints are about texts"
    if find_spec("llguidance") is None:
        return "llguidance is not installed beside the worker, and masks of constraints need it"
    return ""


class Constraints:
    """One worker's. No process starts before the first constraint."""

    def __init__(
        self, tokenizer_json: bytes, sizes: Sizes, eos_token_ids: Sequence[int], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """Raises OSError without memory."""
        server = ServerProcess(tokenizer_json, sizes, eos_token_ids)
        self._area, self._eos = server.area, frozenset(eos_token_ids)
        self._registry = Registry()
        self._supervisor = Supervisor(server, self._registry, limits)
        self._num_constraints = self._num_starts = 0

    def prepare(self, hash_: bytes, source: bytes) -> None:
        """Begins to prepare a constraint. The answer comes by `answers`."""
        prepared = self._registry.by_hash.get(hash_)
        if prepared is not None:
            if prepared.is_answered:
                self._registry.answers.append((hash_, ""))
            return
        number = self._num_constraints % MAX_NUMBER + 1
        while number in self._registry.by_id:
            number = number % MAX_NUMBER + 1
        self._num_constraints = number
        prepared = Prepared(id=number, hash=hash_, source=source)
        self._registry.by_hash[hash_] = self._registry.by_id[prepared.id] = prepared
        self._supervisor.prepare(prepared)

    def drop(self, hash_: bytes) -> None:
        prepared = self._registry.by_hash.get(hash_)
        if prepared is not None:
            self._registry.remove(prepared, "the constraint was dropped")
            self._supervisor.drop(prepared)

    def begin_session(self) -> None:
        """A scheduler follows that has sent no constraint yet."""
        self.forget_rows()
        for hash_ in list(self._registry.by_hash):
            self.drop(hash_)
        self._registry.answers.clear()

    def forget_rows(self) -> None:
        for constrained in self._registry.rows.values():
            constrained.end()
        self._registry.rows.clear()

    @property
    def is_preparing(self) -> bool:
        """Whether `answers` will return something sooner or later."""
        return bool(self._registry.answers or self._registry.unanswered())

    def answers(self) -> list[tuple[bytes, str]]:
        """The hashes of constraints that became ready, or why they cannot be used. Does not wait."""
        if self._registry.unanswered():
            self._supervisor.look(waits_for_rows=False)
        answers = self._registry.answers.copy()
        self._registry.answers.clear()
        return answers

    def start(self, row: int, hash_: bytes, output_tokens: NDArray[np.int32]) -> None:
        """The row starts with these output tokens, and with a constraint or, if the hash is empty, without one."""
        before = self._registry.rows.pop(row, None)
        if before is not None:
            before.end()
        if not hash_:
            return
        self._num_starts = self._num_starts % MAX_NUMBER + 1
        num = output_tokens.size
        self._area.tokens[row, :num] = output_tokens
        constraint = self._registry.by_hash.get(hash_)
        constrained = ConstrainedRow(
            row=row,
            start=self._num_starts,
            constraint=constraint or Prepared(id=0, hash=hash_, source=b""),
            num_tokens=num,
        )
        self._registry.rows[row] = constrained
        if constraint is None:
            # A plan that was in flight when the answer was an error.
            constrained.fail("the constraint is not prepared")
        elif constraint.is_answered:
            self._supervisor.ask([constrained])

    def row(self, row: int) -> ConstrainedRow:
        return self._registry.rows[row]

    def learn(self, sampled: Iterable[tuple[ConstrainedRow, int]]) -> None:
        """Adds a token to each row, -1 for one without meaning, and waits until their fates are known."""
        changed: list[ConstrainedRow] = []
        for constrained, token in sampled:
            if self._registry.rows.get(constrained.row) is not constrained or constrained.fate is not Fate.OPEN:
                continue
            if token < 0 or token in self._eos:
                constrained.end()
                continue
            self._area.tokens[constrained.row, constrained.num_tokens] = token
            constrained.num_tokens += 1
            changed.append(constrained)
        self._wait(changed, lambda constrained: constrained.is_taken)

    def are_masked(self, rows: Sequence[ConstrainedRow]) -> bool:
        """Whether the masks of these rows are there. Called again and again, it keeps to the limits of time."""
        if not all(constrained.is_masked for constrained in rows):
            self._supervisor.ask(rows)
            self._supervisor.look(waits_for_rows=True)
        return all(constrained.is_masked for constrained in rows)

    def masks(self, rows: Sequence[ConstrainedRow], into: NDArray[np.int32]) -> None:
        """Waits for the masks of the rows' next tokens and writes them, in order, to int32 [n, words].

        A row without a mask, because it is complete or has failed, may have any token.
        """
        self._wait(rows, lambda constrained: constrained.is_masked)
        np.take(self._area.masks, [constrained.row for constrained in rows], axis=0, out=into)
        for i, constrained in enumerate(rows):
            if constrained.fate is not Fate.OPEN:
                into[i] = -1

    def _wait(self, rows: Sequence[ConstrainedRow], is_done: Callable[[ConstrainedRow], bool]) -> None:
        self._supervisor.ask(rows)
        while not all(is_done(constrained) for constrained in rows):
            self._supervisor.wait()
            self._supervisor.ask(rows)

    def close(self) -> None:
        self._supervisor.close()
