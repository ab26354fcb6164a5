"""One live request: its Submit, its tokens, and its phase.

**Phases.** A request waits in the queue, runs in a row of a lane, or has ended. `TRANSITIONS` lists all transitions.
While it runs, its counters, its page list and its newest tokens are in the lane's `Rows`. When it leaves the row, its
tokens move here and its pages are released, so it can resume on any lane.

**Pending plans.** When a request is preempted, plans that contain it may still be in flight. Their tokens are valid and
are delivered when the results arrive. Until then some of its tokens are not known, so it cannot be admitted again.
`pending_plans` counts these plans, `pending_tokens` the tokens that they will sample for the request. After a lane
reset both are zero, because the plans of the old generation are void.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.events import Submit
from scheduler_svc.core.messages.page_hash import next_hash
from scheduler_svc.core.messages.resources import CONSTRAINT, Need
from tandem_contract.plural import numbered


class Phase(StrEnum):
    """The phases of a request. Prefill and decode are one phase: both compute known tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Move(StrEnum):
    """The transitions between phases."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    RESET = "reset"
    END = "end"


# Any other combination is a bug and raises AssertionError.
TRANSITIONS: dict[tuple[Phase, Move], Phase] = {
    (Phase.WAITING, Move.ADMIT): Phase.RUNNING,
    (Phase.RUNNING, Move.PREEMPT): Phase.WAITING,
    (Phase.RUNNING, Move.RESET): Phase.WAITING,
    (Phase.WAITING, Move.END): Phase.ENDED,
    (Phase.RUNNING, Move.END): Phase.ENDED,
}


@dataclass(slots=True, eq=False)
class OutputWeights:
    """Which weights computed a request's output. It costs nothing as long as no weights were updated."""

    spans: list[WeightsSpan] = field(default_factory=list[WeightsSpan])
    """Empty: those that the workers were started with."""
    keeps_pages: bool = False
    """Whether some of the row's pages were computed by older weights. No other request shares them."""

    def restore(self, spans: Iterable[WeightsSpan]) -> None:
        """Takes the spans of an output that an earlier process began."""
        self.spans += spans

    def begin(self, version: str, num_outputs: int) -> None:
        """The output continues with this version after `num_outputs` tokens."""
        spans = self.spans
        if (spans[-1].version if spans else "") == version:
            return
        if not spans and num_outputs:
            spans.append(WeightsSpan(from_token=0, version=""))
        if spans and spans[-1].from_token == num_outputs:
            del spans[-1]
        if not spans or spans[-1].version != version:
            spans.append(WeightsSpan(from_token=num_outputs, version=version))

    def of(self, output_tokens: int) -> tuple[WeightsSpan, ...]:
        """Returns the spans of an output of this length."""
        spans = tuple(span for span in self.spans if span.from_token < output_tokens)
        return () if spans and len(spans) == 1 and not spans[0].version else spans


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sample of a submitted request. It is queued, runs and ends by itself. Times are on the core's clock."""

    handle: int
    """Also its number in the order of arrival. Never used again, so the result of a plan cannot be applied to another
    request."""
    submit: Submit
    """What all samples of the request share, without the bytes that others keep (`acceptance`). Its reader is the first
    one."""
    sample_idx: int = 0
    """Index of the sample in its submitted request. The random numbers of sampling depend on it."""
    frontend: str
    """The front end that reads the output. Empty if the request is detached; `stream` is then its handle."""
    stream: int
    total_length: int
    """Number of prompt and output tokens at which the request ends with LENGTH, or CONTEXT_FULL if `is_cut`."""
    expected_length: int
    """Number of tokens that it is expected to have at its end, decided at its arrival."""
    meter: int = 0
    """Number of its tenant's account (`queue/quotas`) if that is charged for each token as it comes; otherwise 0."""
    is_cut: bool = False
    """Whether `total_length` is what the workers hold, not what the caller or the operator wants."""
    stops: frozenset[int] = frozenset()
    """Its stop tokens, of which each new token may be one."""
    banned: tuple[int, ...] = ()
    """Tokens that may not be sampled before the output has `min_new_tokens` tokens."""
    arrived_at: float
    virtual_start: int = 0
    """Virtual start time among the tenant's requests, in tokens of service (`turns.FairShare`)."""
    turn: int = -1
    """Virtual start time of the tenant's service (`queue/turns`), from the first row on."""
    passed_over: int = 0
    """Number of requests behind this one that were admitted first because more of their prompt was cached."""
    needs: tuple[Need, ...] = ()
    """What a worker must have prepared (`preparations`), at most one resource of each kind."""
    page_hashes: list[bytes] = field(default_factory=list[bytes])
    """Hashes of the leading full pages, as far as they were computed."""
    weights: OutputWeights = field(default_factory=OutputWeights)
    phase: Phase = Phase.WAITING
    worker: str = ""
    """The worker of the lane that the request runs on. Empty unless it is running."""
    row: int = 0
    """The row in that lane. 0 unless the request is running."""
    computed: int = 0
    """Largest number of confirmed positions when the request lost a row. If they are computed again, they count in
    `recomputed_tokens`."""
    outputs: list[Int32Array] = field(default_factory=list[Int32Array])
    """Output tokens in order. While the request runs, the newest ones are in its row (`Rows`)."""
    num_outputs: int = 0
    """Number of tokens in `outputs`."""
    prompt_logprobs_from: int = 0
    """The first prompt position with logprobs that must still be sent, or 0."""
    pending_plans: int = 0
    """Number of pending plans (see above). The request cannot be admitted until this is 0."""
    pending_tokens: int = 0
    """Number of tokens that those plans will sample for the request."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    recomputed_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    worker_changes: int = 0
    worker_wait_since: float | None = None
    """When the wait for a worker that can hold the request began. None if a present worker can hold it."""
    has_wait_deadline: bool = False
    """Whether the queue has a deadline of this wait, or of an earlier one."""

    def move(self, move: Move) -> None:
        """Makes a transition. Raises AssertionError if `TRANSITIONS` does not contain it."""
        to = TRANSITIONS.get((self.phase, move))
        assert to is not None, f"request {self.submit.request_id}: {move} while {self.phase}"
        self.phase = to
        self.preemptions += move is Move.PREEMPT
        self.worker_changes += move is Move.RESET
        self.weights.keeps_pages = False

    @property
    def constraint(self) -> bytes:
        """Hash of the constraint that the output matches. Empty without one."""
        return next((need.hash for need in self.needs if need.kind == CONSTRAINT), b"") if self.needs else b""

    @property
    def other_needs(self) -> tuple[Need, ...]:
        """What it needs besides a constraint."""
        return tuple(need for need in self.needs if need.kind != CONSTRAINT) if self.needs else ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.prompt)

    def admitted(self, now: float, *, first_position: int) -> bool:
        """Records that the request gets a row and computes from `first_position` on. Returns True the first time."""
        self.recomputed_tokens += max(0, self.computed - first_position)
        if self.admitted_at is not None:
            return False
        self.admitted_at = now
        self.cached_prompt_tokens = min(first_position, self.prompt_tokens)
        return True

    def void_pending_plans(self) -> None:
        """Sets the counts of pending plans and tokens to zero, because the plans became void."""
        self.pending_plans = self.pending_tokens = 0

    def take_pending_token(self) -> None:
        """Counts down when the result of a pending plan contains a token for the request."""
        assert self.pending_tokens > 0, f"request {self.submit.request_id}: a token arrived that was not in flight"
        self.pending_tokens -= 1

    def prompt_logprobs_sent(self, start: int, count: int) -> None:
        """Records that the logprobs of `count` prompt positions from `start` on were sent.

        Raises AssertionError if `start` is not the next position.
        """
        assert start == self.prompt_logprobs_from, f"request {self.submit.request_id}: prompt logprobs out of order"
        end = start + count
        self.prompt_logprobs_from = end if end < self.prompt_tokens else 0

    @property
    def known(self) -> int:
        """Number of tokens that the request has. While it runs, its row may have more (`Rows.known`)."""
        return len(self.submit.prompt) + self.num_outputs

    @property
    def unmade(self) -> int:
        """Number of output tokens that its tenant was charged for in advance and that were not made."""
        return 0 if self.submit.is_max_unset else self.total_length - self.known

    def least_length(self, known: int) -> int:
        """Returns the length that a worker must hold to run the request once it has `known` tokens.

        With an unset maximum that is one token more, but at least `min_new_tokens`.
        """
        if not self.submit.is_max_unset:
            return self.total_length
        return min(self.total_length, max(known + 1, len(self.submit.prompt) + self.submit.min_new_tokens))

    @property
    def size(self) -> str:
        """What a worker must hold to run the waiting request, in words."""
        is_unset = self.submit.is_max_unset
        parts = "prompt, output so far and what must follow" if is_unset else "prompt and max_new_tokens"
        return f"{numbered(self.least_length(self.known), 'token')} ({parts})"

    def tokens_between(self, start: int, end: int) -> Int32Array:
        """Returns the tokens from `start` to `end - 1`, int32[end - start], which the caller must not change.

        `end` is at most `known`.
        """
        prompt = len(self.submit.prompt)
        if self.outputs and end == prompt + self.num_outputs and len(self.outputs[-1]) >= end - start:
            return self.outputs[-1][start - end :]  # the common case: a page that became full just now
        if end <= prompt:
            # The whole prompt is not sliced: a slice takes 112 bytes more per row while its plan lives.
            return self.submit.prompt if end - start == prompt else self.submit.prompt[start:end]
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
            parts.append(self.submit.prompt[start:])
        return np.concatenate(parts[::-1])

    def page_tokens(self, page_idx: int, page_size: int) -> bytes:
        """Returns the tokens of the page with this logical index, little-endian int32."""
        start, end = page_idx * page_size, (page_idx + 1) * page_size
        tokens = self.submit.prompt[start:end] if end <= len(self.submit.prompt) else self.tokens_between(start, end)
        return tokens.tobytes()

    def hash_known(self, page_size: int) -> None:
        """Hashes all full pages of a request without a row."""
        if not self.submit.prefix_root:
            return
        hashes = self.page_hashes
        for page_idx in range(len(hashes), self.known // page_size):
            self.add_hash(self.page_tokens(page_idx, page_size))

    def add_hash(self, tokens: bytes) -> bytes:
        """Adds and returns the hash of the next full page, which has these tokens."""
        page_hash = next_hash(self.page_hashes[-1] if self.page_hashes else self.submit.prefix_root, tokens)
        self.page_hashes.append(page_hash)
        return page_hash

    def restore(self, tokens: Int32Array) -> None:
        """Takes up the output of an earlier process, which computed all positions before the last token."""
        self.add_outputs(tokens)
        if len(tokens):
            self.computed = self.known - 1
            self.first_token_at = self.last_token_at = self.arrived_at

    def add_outputs(self, tokens: Int32Array) -> None:
        if len(tokens):
            self.outputs.append(tokens)
            self.num_outputs += len(tokens)
