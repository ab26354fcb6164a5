"""How a request ends: the one terminal answer of an accepted request, and its parts."""

from dataclasses import dataclass
from enum import StrEnum


class EndReason(StrEnum):
    """Why an accepted request ended without an error."""

    EOS = "eos"
    STOP_TOKEN = "stop token"
    STOP_STRING = "stop string"
    LENGTH = "length"
    TIME_LIMIT = "time limit"
    ABORTED = "aborted"
    CONTEXT_FULL = "context full"


class FailureCode(StrEnum):
    """Why an accepted request failed."""

    INTERNAL = "internal"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    NO_WORKER = "no worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that ended a request. `message` is one sentence."""

    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Tokens and times of one request, sent at its end."""

    prompt_tokens: int
    output_tokens: int
    """Tokens of the output. A stop string may end it before the last sampled token."""
    discarded_tokens: int
    """Tokens sampled after the end of the output, including those that are still in flight."""
    recomputed_tokens: int
    """Positions computed more than once, because of preemptions and lane resets."""
    cached_prompt_tokens: int
    """Prompt tokens found in the prefix cache when the request got its first row."""
    queue_seconds: float
    """From arrival to the first row."""
    prefill_seconds: float
    """From the first row to the first output token."""
    first_token_seconds: float
    """From arrival to the first output token."""
    decode_seconds: float
    """From the first output token to the last."""
    total_seconds: float
    """From arrival to the end."""
    preemptions: int
    worker_changes: int
    """Lane resets while the request was running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The one terminal answer of an accepted request. Exactly one of `reason` and `failure` is set."""

    stream: int
    reason: EndReason | None
    failure: Failure | None
    stop_token_id: int | None
    stats: Stats
