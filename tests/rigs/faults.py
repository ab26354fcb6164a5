"""Faults that a checking worker commits on order. Owns when; the executor and the worker own what follows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Steps are counted from 1 over all plans applied since the start, whatever their generation."""

    fail_steps: frozenset[int] = frozenset()
    oom_steps: frozenset[int] = frozenset()
    # Answered as if a plan before it had been lost.
    out_of_sync_steps: frozenset[int] = frozenset()
    # A step that computes this token fails, whoever shares it.
    fail_token: int | None = None
    # Logits behind this token are not finite.
    nonfinite_token: int | None = None
    # The worker stops answering, heartbeats included.
    hang_step: int | None = None
    # The worker ends at once, without a word, with this step unanswered.
    exit_step: int | None = None
