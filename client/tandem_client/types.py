"""The service's answers as frozen values, independent of protobuf.

Owns the names of their fields, and the form of conversations as dicts, which is that of OpenAI's API. Knows nothing of
messages or calls.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tandem_client.control_types import *  # noqa: F403
from tandem_client.control_types import SamplingDefaults, WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    # JSON, as the model wrote it. A call that was cut off is not complete JSON.
    arguments: str

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises ValueError if they are not a JSON object, as in a call that was cut off."""
        try:
            parsed: Any = json.loads(self.arguments)
        except RecursionError:
            raise ValueError(f"the arguments of {self.name} are nested too deeply") from None
        if not isinstance(parsed, dict):
            raise ValueError(f"the arguments of {self.name} are {self.arguments[:60]!r}; they must be a JSON object")
        return parsed  # pyright: ignore[reportUnknownVariableType]

    def as_dict(self) -> dict[str, Any]:
        """The call in the form of OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    # system, developer, user, assistant or tool.
    role: str
    # Text, or parts of text, which the model's template joins; None for a message without content.
    content: str | tuple[str, ...] | None = None
    # Only in messages of the assistant. Templates decide whether the model sees the reasoning again.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    # Only in messages of a tool: the call that it answers.
    tool_call_id: str = ""
    # The name of the speaker or of the tool.
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The message in the form of OpenAI's API, as `generate(chat=[...])` also takes it; without empty fields."""
        parts = [{"type": "text", "text": part} for part in self.content] if isinstance(self.content, tuple) else None
        others: dict[str, Any] = {
            "reasoning_content": self.reasoning,
            "tool_calls": [call.as_dict() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        made = {"role": self.role, "content": self.content if parts is None else parts}
        return made | {name: value for name, value in others.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A new piece of a tool call. The arguments of all pieces of one call, joined, are a JSON object."""

    # The number of the call in the answer, from 0.
    index: int
    # Both are set in the first piece of a call, and empty in others.
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as the model's template renders it."""

    text: str
    token_ids: tuple[int, ...]


class FinishReason(StrEnum):
    """Why a stream ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"
    # The model's length was reached before max_new_tokens; or this was unset, and no worker had room for more.
    CONTEXT_FULL = "context_full"
    # The output satisfies the constraint, and nothing can follow.
    CONSTRAINT_COMPLETE = "constraint_complete"
    # A reason that is newer than this client.
    UNKNOWN = "unknown"


class AbortOutcome(StrEnum):
    """The outcome of an Abort for one id."""

    ABORTED = "aborted"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


class AbortOutcomes(dict[str, AbortOutcome]):
    """The outcome for each id, in the order of the answer."""

    def __init__(self, outcomes: Iterable[tuple[str, AbortOutcome]], details: Mapping[str, str]) -> None:
        super().__init__(outcomes)
        # For ids without a request: the names that the service looked for, in one sentence.
        self.details = dict(details)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOffset:
    """How much of a sample was received: token ids, and characters of text. `stream.offsets` has them."""

    token_ids: int = 0
    text_chars: int = 0
    reasoning_chars: int = 0
    # Tool calls that have begun, and the characters of the arguments of all of them.
    tool_calls: int = 0
    tool_argument_chars: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingDefaults):
    """The values of sampling options that are in force for a request."""

    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The service has accepted the request; tokens follow."""

    request_id: str
    sampling: Sampling
    prompt_tokens: int
    # The number in force; below the requested one if the model's length leaves fewer.
    max_new_tokens: int
    requests_ahead: int
    # Resumes the request; empty if it ends with its stream.
    resume_secret: bytes = field(default=b"", repr=False)
    # What is served in another way than the request says, one sentence each.
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPiece:
    """What a token adds to the text; all pieces of a text, joined, are that text.

    The text of a character in several tokens stands with its last one. A special token that is left out of the text has
    its name as `text`, and no `data`.
    """

    text: str
    # The token's own bytes.
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities at one token: before penalties, biases and temperature."""

    # The logprob of the token itself.
    logprob: float
    # The most probable token ids with their logprobs, in order; the token itself is not added to them.
    top: tuple[tuple[int, float], ...] = ()
    # With `logprob_pieces`: of the token, and of each of `top`, as if that came instead of it.
    piece: TokenPiece | None = None
    top_pieces: tuple[TokenPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """Logprobs of the prompt's tokens from position `start` on."""

    start: int
    logprobs: tuple[TokenLogprob, ...]
    # The prompt's first token, which has no logprob: with `logprob_pieces`, if `start` is 1.
    first: TokenPiece | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The new tokens of one sample, and new text, which may lag behind the tokens.

    Usually one token. Above some 5,000 tokens per second, a front end merges those of 15 to 20 ms into one delta, or
    more if it has too little CPU; first and last tokens are not delayed.
    """

    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    sample_idx: int = 0
    # One for each new token; empty if they were not requested.
    logprobs: tuple[TokenLogprob, ...] = ()
    # In a chat with a parsed answer: new reasoning and new pieces of tool calls; `text` is then the content.
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The request makes no progress. The next delta ends the wait."""

    reason: WaitReason
    # One sentence.
    message: str
    # Since when it waits: Unix time by the service's clock.
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How one sample ended."""

    reason: FinishReason
    stop_token_id: int | None
    stop_string: str | None
    output_tokens: int
    sample_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The token counts of a request."""

    prompt_tokens: int
    output_tokens: int
    discarded_tokens: int
    recomputed_tokens: int
    # Prompt tokens that were found in the prefix cache and not computed.
    cached_prompt_tokens: int
    # Output tokens of a chat that are reasoning, with its marks.
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The durations of a request in seconds, and how often it was interrupted."""

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    worker_changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpan:
    """The output tokens of a sample from `from_token` to the next span were sampled with these weights."""

    from_token: int
    # Empty for the weights that the workers were started with.
    version: str
    sample_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last message of a stream, for all its samples together."""

    usage: Usage
    timing: Timing
    # Which weights computed the output; a sample without a span has those that the workers were started with.
    weights: tuple[WeightsSpan, ...] = ()
