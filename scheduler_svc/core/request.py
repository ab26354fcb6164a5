"""One admitted request: what it asked for, what it has, and the table of its phases.

Owns the cold state. While a request runs, its hot counters live in the lane's `Rows`; they come back here when it
leaves its row. Knows nothing of pages or plans.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from scheduler_svc.core.effects import Stats
from scheduler_svc.core.events import Int32Array, Sampling


class Phase(StrEnum):
    """Where a request is. Prefill, decode and resume are not phases: they are one mechanism, catching up."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Move(StrEnum):
    """What can happen to a request."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    RESET = "reset"
    END = "end"


# Everything that is not here is a bug, and asserts.
TRANSITIONS: dict[tuple[Phase, Move], Phase] = {
    (Phase.WAITING, Move.ADMIT): Phase.RUNNING,
    (Phase.RUNNING, Move.PREEMPT): Phase.WAITING,
    (Phase.RUNNING, Move.RESET): Phase.WAITING,
    (Phase.WAITING, Move.END): Phase.ENDED,
    (Phase.RUNNING, Move.END): Phase.ENDED,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`handle` is unique for the core's life, so a late result can never meet a request that it was not for."""

    handle: int
    frontend: str
    stream: int
    request_id: str
    prompt: Int32Array
    sampling: Sampling
    sample_idx: int
    """Which sample of its submitted request this is; keys the noise."""
    total_length: int
    """Prompt and output tokens at which it ends with LENGTH."""
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    banned: tuple[int, ...]
    """Tokens that may not be drawn before `min_new_tokens` are out."""
    ignore_eos: bool
    priority: int
    arrival: int
    arrived_at: float
    phase: Phase = Phase.WAITING
    row: int = 0
    """Its row while RUNNING, else 0."""
    outputs: list[Int32Array] = field(default_factory=list[Int32Array])
    """Output tokens flushed from its row, in order; all of them while it has no row."""
    num_outputs: int = 0
    """Tokens in `outputs`."""
    prompt_logprobs_from: int = 0
    """The first prompt position whose logprobs are wanted and not told yet; 0: none is."""
    late_plans: int = 0
    """Plans in flight that name a row it was preempted from; until 0 it is not eligible."""
    late_samples: int = 0
    """Samples that those plans will bring; they are valid and delivered."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    recomputed_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    worker_changes: int = 0

    def move(self, move: Move) -> None:
        """Takes a transition of the table; any other is a broken invariant."""
        to = TRANSITIONS.get((self.phase, move))
        assert to is not None, f"request {self.request_id}: {move} while {self.phase}"
        self.phase = to

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def top_k(self) -> int:
        """Alternatives that it wants beside each logprob."""
        return max(0, self.sampling.num_logprobs - 1)

    def told_prompt_logprobs(self, start: int, count: int) -> None:
        """Notes that those of `count` positions went out; in order, or the invariant is broken."""
        assert start == self.prompt_logprobs_from, f"request {self.request_id}: prompt logprobs out of order"
        end = start + count
        self.prompt_logprobs_from = end if end < self.prompt_tokens else 0

    @property
    def known(self) -> int:
        """Known tokens; of a running request only those flushed, its row knows the rest."""
        return len(self.prompt) + self.num_outputs

    @property
    def last_position(self) -> int:
        """Positions computed in its whole life: the last token is sampled, never computed."""
        return self.total_length - 1

    def known_tokens(self) -> Int32Array:
        """int32[known], a fresh array; only while it has no row."""
        return np.concatenate([self.prompt, *self.outputs])

    def add_outputs(self, tokens: Int32Array) -> None:
        """Takes tokens over from its row."""
        if len(tokens):
            self.outputs.append(tokens)
            self.num_outputs += len(tokens)

    def stats(self, *, now: float, output_tokens: int, discarded_tokens: int) -> Stats:
        """Its account at its end."""
        admitted = now if self.admitted_at is None else self.admitted_at
        first = self.first_token_at
        last = now if self.last_token_at is None else self.last_token_at
        return Stats(
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens,
            discarded_tokens=discarded_tokens,
            recomputed_tokens=self.recomputed_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            queue_seconds=admitted - self.arrived_at,
            prefill_seconds=0.0 if first is None else first - admitted,
            first_token_seconds=0.0 if first is None else first - self.arrived_at,
            decode_seconds=0.0 if first is None else last - first,
            total_seconds=now - self.arrived_at,
            preemptions=self.preemptions,
            worker_changes=self.worker_changes,
        )
