"""What all answers of one HTTP request have in common: id, model, time, prompts, usage; and why a choice ended."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.v1 import inference_pb2

from tandem_client.gateway.answers.logprobs import TokenLogprob, tokens_of
from tandem_client.gateway.openai.wanted import Wanted

_COMPLETION_ID, _CHAT_ID = "cmpl-", "chatcmpl-"
STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
_PREFIX = "FINISH_REASON_"
_STOPS = frozenset({
    inference_pb2.FINISH_REASON_EOS,
    inference_pb2.FINISH_REASON_STOP_TOKEN,
    inference_pb2.FINISH_REASON_STOP_STRING,
    inference_pb2.FINISH_REASON_CONSTRAINT_COMPLETE,
})  # fmt: skip
# Their names say enough.
_PLAIN = frozenset({
    inference_pb2.FINISH_REASON_EOS,
    inference_pb2.FINISH_REASON_LENGTH,
    inference_pb2.FINISH_REASON_CONSTRAINT_COMPLETE,
})  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ShownPrompt:
    """`text` and `token_ids` are empty where the answer does not show them."""

    text: str = ""
    token_ids: Sequence[int] = ()
    # Of all tokens but the first, as far as they have come.
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    first: inference_pb2.TokenPiece | None = None

    def add(self, info: inference_pb2.PromptInfo, num_top: int) -> None:
        """Takes the next piece of the prompt's logprobs."""
        ids = self.token_ids[info.start : info.start + len(info.logprobs.logprobs)]
        self.logprobs += tokens_of(ids, info.logprobs, num_top)
        if info.HasField("first"):
            self.first = info.first

    @property
    def scored(self) -> list[TokenLogprob]:
        """All tokens; the first has no logprob."""
        # A prompt of one token has no logprobs, and that token has its text.
        piece = self.first or inference_pb2.TokenPiece(text=self.text, data=self.text.encode())
        first = [TokenLogprob(token_id, None, piece.text, piece.data) for token_id in self.token_ids[:1]]
        return first + self.logprobs


class Tally:
    """Counts from the messages of all calls. Until a call's Summary has come, its tokens are those that have come."""

    __slots__ = ("_cached", "_hides_output", "_output", "_prompt", "_reasoning")

    def __init__(self, num_calls: int, *, hides_output: bool) -> None:
        self._prompt = [0] * num_calls
        self._output = [0] * num_calls
        self._cached = 0
        self._reasoning = 0
        self._hides_output = hides_output

    def accepted(self, idx: int, accepted: inference_pb2.Accepted) -> None:
        """Takes the number of a prompt's tokens."""
        self._prompt[idx] = accepted.prompt_tokens

    def tokens(self, idx: int, number: int) -> None:
        """Counts tokens of a delta that has ids."""
        self._output[idx] += number

    def summary(self, idx: int, usage: inference_pb2.Usage) -> None:
        """Takes the numbers of a call that has ended."""
        self._prompt[idx], self._output[idx] = usage.prompt_tokens, usage.output_tokens
        self._cached += usage.cached_prompt_tokens
        self._reasoning += usage.reasoning_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; each counts once, however many samples it has."""
        return sum(self._prompt)

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return 0 if self._hides_output else sum(self._output)

    def as_json(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """`prompts`: one for each call, in order."""

    wanted: Wanted
    request_id: str
    model: str
    prompts: Sequence[ShownPrompt]
    tally: Tally
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The id of the answer."""
        return f"{_CHAT_ID if self.wanted.is_chat else _COMPLETION_ID}{self.request_id}"

    def head(self, kind: str) -> dict[str, object]:
        """The first members of an answer or a chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def finish_reason(finished: inference_pb2.Finished, *, has_calls: bool = False) -> str:
    """OpenAI's finish_reason. What was cut short by a limit of any kind, or by an operator, is `length`."""
    if finished.reason in _STOPS:
        return TOOL_CALLS if has_calls else STOP
    return LENGTH


def stop_reason(finished: inference_pb2.Finished) -> str | int | None:
    """What matched, as vLLM gives it; else the service's reason where OpenAI has no word for it."""
    matched = finished.WhichOneof("matched")
    if matched == "stop_string":
        return finished.stop_string
    if finished.reason == inference_pb2.FINISH_REASON_STOP_TOKEN:
        return finished.stop_token_id
    if finished.reason in _PLAIN:
        return None
    return inference_pb2.FinishReason.Name(finished.reason).removeprefix(_PREFIX).lower()
