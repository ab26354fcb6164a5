"""Faults that a checking worker commits at given steps. Owns the steps; the executor and the worker own the effects."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Steps count from 1 over all applied plans, across generations."""

    fail_steps: frozenset[int] = frozenset()
    oom_steps: frozenset[int] = frozenset()
    # These steps are answered as if an earlier plan had been lost.
    out_of_sync_steps: frozenset[int] = frozenset()
    # Every step that computes this token fails.
    fail_token: int | None = None
    # A step that computes this token kills the worker, or hangs it (`executor.Poisoned`).
    kill_token: int | None = None
    hang_token: int | None = None
    # Logits behind this token are not finite.
    nonfinite_token: int | None = None
    # Steps with more positions or more rows than this run out of memory.
    memory_tokens: int | None = None
    memory_rows: int | None = None
    # Every step that computes this token runs out of memory.
    oom_token: int | None = None
    # At this step the worker stops answering, heartbeats included.
    hang_step: int | None = None
    # At this step the process exits without an answer.
    exit_step: int | None = None
