"""One admitted request: what it asked for, what it has, and the table of its phases.

Owns the cold state, the hashes that name its pages among it. While a request runs, its hot counters live in the lane's
`Rows`; they come back here when it leaves its row. Knows nothing of which pages it holds, or of plans.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.effects import Stats
from scheduler_svc.core.messages.page_hash import next_hash


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
    sampling: bytes
    """A serialized SamplingParams; the core does not read it."""
    sample_idx: int
    """Which sample of its submitted request this is; keys the noise."""
    total_length: int
    """Prompt and output tokens at which it ends, with LENGTH unless `is_cut`."""
    is_cut: bool = False
    """The model's length is less than prompt and max_new_tokens: it ends with CONTEXT_FULL."""
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    banned: tuple[int, ...]
    """Tokens that may not be drawn before `min_new_tokens` are out."""
    ignore_eos: bool
    priority: int
    arrival: int
    arrived_at: float
    virtual_start: int = 0
    """Its place in the order, in tokens of service (`tenants.py`)."""
    passed_over: int = 0
    """Requests behind it that were admitted before it, because more of theirs was kept."""
    prefix_root: bytes = b""
    """What its pages' hashes are chained to; it also stands for the tenant. Empty: no page of it is shared."""
    page_hashes: list[bytes] = field(default_factory=list[bytes])
    """Of its full pages, as far as they were needed."""
    cache_read: bool = True
    cache_write: bool = True
    phase: Phase = Phase.WAITING
    worker: str = ""
    """Whose lane it runs on while RUNNING, else empty."""
    row: int = 0
    """Its row there while RUNNING, else 0."""
    computed: int = 0
    """Positions that were computed and confirmed before it lost its row, at most."""
    outputs: list[Int32Array] = field(default_factory=list[Int32Array])
    """Output tokens flushed from its row, in order; all of them while it has no row."""
    num_outputs: int = 0
    """Tokens in `outputs`."""
    num_logprobs: int = 0
    """0 for none, else 1 + the number of alternatives reported beside each output token."""
    prompt_logprobs_from: int = 0
    """The first prompt position whose logprobs are wanted and not told yet; 0: none is."""
    pending_plans: int = 0
    """Plans in flight that name a row it was preempted from; until 0 it is not eligible."""
    pending_tokens: int = 0
    """Samples that those plans will bring; they are valid and delivered."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    recomputed_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    worker_changes: int = 0
    unheld_since: float | None = None
    """Since when no worker that serves could hold it; None: one can."""
    is_wait_due: bool = False
    """Whether the end of that wait is among the deadlines ahead."""

    def move(self, move: Move) -> None:
        """Takes a transition of the table; any other is a broken invariant."""
        to = TRANSITIONS.get((self.phase, move))
        assert to is not None, f"request {self.request_id}: {move} while {self.phase}"
        self.phase = to
        self.preemptions += move is Move.PREEMPT
        self.worker_changes += move is Move.RESET

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def top_k(self) -> int:
        """Alternatives that it wants beside each logprob."""
        return max(0, self.num_logprobs - 1)

    def admitted(self, now: float, *, first_position: int) -> bool:
        """Records that the request gets a row which starts at `first_position`; True the first time."""
        self.recomputed_tokens += max(0, self.computed - first_position)
        if self.admitted_at is not None:
            return False
        self.admitted_at = now
        self.cached_prompt_tokens = first_position
        return True

    def pass_over(self) -> None:
        """Counts that a request behind this one was admitted first."""
        self.passed_over += 1

    def emitted_first_token(self, now: float) -> None:
        """Records the time of the first output token."""
        self.first_token_at = now

    def emitted_last_token(self, now: float) -> None:
        """Records the time of the last output token."""
        self.last_token_at = now

    def void_pending_plans(self) -> None:
        """The plans in flight that name the request became void: no token comes from them."""
        self.pending_plans = self.pending_tokens = 0

    def pending_plan_answered(self) -> None:
        """One of the plans in flight that name a row which the request left has been answered."""
        self.pending_plans -= 1

    def take_pending_token(self) -> None:
        """A plan from before the preemption brought a token for the request."""
        assert self.pending_tokens > 0, f"request {self.request_id}: a token arrived that was not in flight"
        self.pending_tokens -= 1

    def worker_holds_it(self) -> None:
        """A worker that serves can hold the request, or runs it."""
        self.unheld_since = None

    def no_worker_holds_it(self, now: float) -> bool:
        """Starts the wait for a worker that can hold the request; True if a deadline for its end is to be added."""
        if self.unheld_since is not None:
            return False
        self.unheld_since = now
        is_new, self.is_wait_due = not self.is_wait_due, True
        return is_new

    def wait_deadline_came(self, now: float, limit_seconds: float) -> float | None:
        """The deadline added with the wait has come. Returns the time at which the wait ends, None if it is over.

        The wait may have ended and begun again since; the returned time is then later than `now`.
        """
        self.is_wait_due = self.unheld_since is not None and now < self.unheld_since + limit_seconds
        return None if self.unheld_since is None else self.unheld_since + limit_seconds

    def prompt_logprobs_sent(self, start: int, count: int) -> None:
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

    def tokens_between(self, start: int, end: int) -> Int32Array:
        """int32[end - start] of the tokens that it holds, which its row's newest are not part of."""
        prompt = len(self.prompt)
        if self.outputs and end == prompt + self.num_outputs and len(self.outputs[-1]) >= end - start:
            return self.outputs[-1][start - end :]  # the page that just filled
        if end <= prompt:
            return self.prompt[start:end]
        parts: list[Int32Array] = []
        following = self.known
        for part in reversed(self.outputs):
            first = following - len(part)
            if first < end:
                parts.append(part[max(0, start - first) : end - first])
            following = first
            if first <= start:
                break
        if start < prompt:
            parts.append(self.prompt[start:])
        return np.concatenate(parts[::-1])

    def page_tokens(self, page_idx: int, page_size: int) -> bytes:
        """The tokens of its page of this logical index, little-endian int32."""
        return self.tokens_between(page_idx * page_size, (page_idx + 1) * page_size).tobytes()

    def hash_known(self, page_size: int) -> None:
        """Brings the hashes up to all full pages that it knows; only while it has no row."""
        if not self.prefix_root:
            return
        hashes = self.page_hashes
        for page_idx in range(len(hashes), self.known // page_size):
            self.add_hash(self.page_tokens(page_idx, page_size))

    def add_hash(self, tokens: bytes) -> bytes:
        """Names its next full page, whose tokens these are; returns the hash."""
        page_hash = next_hash(self.page_hashes[-1] if self.page_hashes else self.prefix_root, tokens)
        self.page_hashes.append(page_hash)
        return page_hash

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
