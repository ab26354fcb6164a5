"""What all answers of one HTTP request have in common: id, model, time, prompts, usage, logprobs; why a choice ended.

Logprobs have three shapes in OpenAI's and vLLM's APIs. Pure: token ids, numbers and pieces in, JSON out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.v1 import inference_pb2

from tandem_client.gateway.openai.wanted import Wanted

# JSON has no infinity; vLLM has the same bound.
_LOWEST = -9999.0

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


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logprob, and what it adds to the text: see tandem.v1.TokenPiece."""

    token_id: int
    # None: the first token of a prompt.
    logprob: float | None
    text: str
    data: bytes

    @property
    def num_chars(self) -> int:
        """Characters of the text."""
        return len(self.text) if self.data else 0


@dataclass(frozen=True, slots=True)
class TokenLogprob(Scored):
    """One token of a text, and the most probable tokens in its place."""

    top: tuple[Scored, ...] = ()


def tokens_of(ids: Sequence[int], logprobs: inference_pb2.Logprobs, num_top: int) -> list[TokenLogprob]:
    """Joins ids and their packed logprobs; keeps the first `num_top` alternatives of each."""
    found, k = list[TokenLogprob](), logprobs.top_k
    kept = min(k, num_top)
    for i, (token_id, logprob) in enumerate(zip(ids, logprobs.logprobs, strict=True)):
        top_ids, top = logprobs.top_token_ids[i * k : i * k + kept], logprobs.top_logprobs[i * k : i * k + kept]
        alternatives = tuple(
            Scored(top_id, _bounded(value), *_piece(top_id, logprobs.top_pieces, i * k + rank))
            for rank, (top_id, value) in enumerate(zip(top_ids, top, strict=True))
        )
        found.append(TokenLogprob(token_id, _bounded(logprob), *_piece(token_id, logprobs.pieces, i), alternatives))
    return found


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """The `logprobs` of a chat's choice. A token that is left out of the text has no bytes."""

    def entry(token: Scored) -> dict[str, object]:
        data = list(token.data) if token.data else None
        return {"token": token.text, "logprob": token.logprob, "bytes": data}

    content = [{**entry(token), "top_logprobs": [entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def of_completion(parts: Sequence[tuple[int, Sequence[TokenLogprob]]], *, with_top: bool) -> dict[str, object]:
    """The `logprobs` of a completion's choice: parts of the text, each with the character at which it begins."""
    found: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for offset, tokens in parts:
        for token in tokens:
            found["text_offset"].append(offset)
            found["tokens"].append(token.text)
            found["token_logprobs"].append(token.logprob)
            found["top_logprobs"].append(None if token.logprob is None else _by_text(token))
            offset += token.num_chars
    return {**found} if with_top else {**found, "top_logprobs": None}


def of_prompt(tokens: Sequence[TokenLogprob]) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`. The rank of a token that is not among the most probable ones is unknown."""
    found: list[dict[str, object] | None] = [None]
    for token in tokens:
        entries: dict[str, object] = {}
        for rank, top in enumerate(token.top, 1):
            entries[str(top.token_id)] = {"logprob": top.logprob, "rank": rank, "decoded_token": top.text}
        own = {"logprob": token.logprob, "rank": None, "decoded_token": token.text}
        entries.setdefault(str(token.token_id), own)
        found.append(entries)
    return found


def _by_text(token: TokenLogprob) -> dict[str, float | None]:
    """Logprobs by text, the token's own too. Of tokens with equal texts one has the text, first the token itself."""
    found: dict[str, float | None] = {}
    for top in token.top:
        is_taken = top.text in found or (top.text == token.text and top.token_id != token.token_id)
        found[_name(top.token_id) if is_taken else top.text] = top.logprob
    found.setdefault(token.text, token.logprob)
    return found


def _piece(token_id: int, pieces: Sequence[inference_pb2.TokenPiece], idx: int) -> tuple[str, bytes]:
    """(text, bytes). A model without a tokenizer has no pieces and no text."""
    return (pieces[idx].text, pieces[idx].data) if pieces else (_name(token_id), b"")


def _name(token_id: int) -> str:
    """What vLLM writes for an id without a text."""
    return f"token_id:{token_id}"


def _bounded(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


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


class Frame:
    """What a stream and a whole answer have in common: their first members, their prompts, their usage.

    Until the Summary of a call has come, its tokens are those that have come.
    """

    # `object` of a chat and of a completion.
    KINDS: tuple[str, str]

    def __init__(
        self, wanted: Wanted, request_id: str, model: str, prompts: Sequence[ShownPrompt], prompt_tokens: Sequence[int]
    ) -> None:
        """`prompts`, `prompt_tokens`: one for each call of the service, in order."""
        self.wanted, self.prompts = wanted, prompts
        prefix, kind = (_CHAT_ID, self.KINDS[0]) if wanted.is_chat else (_COMPLETION_ID, self.KINDS[1])
        # The first members of an answer or a chunk.
        self.head = {"id": f"{prefix}{request_id}", "object": kind, "created": int(time.time()), "model": model}
        self.num_choices = len(wanted.requests) * wanted.num_samples
        # By call.
        self._prompt, self.output = [*prompt_tokens], [0] * len(prompts)
        self._cached = self._reasoning = 0
        self._begin()

    def _begin(self) -> None:
        """Makes what needs no message yet."""

    def note(self, idx: int, response: inference_pb2.GenerateResponse) -> None:
        """Takes what a message of call `idx` has of its prompt and its usage."""
        if response.HasField("prompt_info") and self.wanted.num_prompt_top is not None:
            self.prompts[idx].add(response.prompt_info, self.wanted.num_prompt_top)
        elif response.HasField("summary"):
            usage = response.summary.usage
            self._prompt[idx], self.output[idx] = usage.prompt_tokens, usage.output_tokens
            self._cached += usage.cached_prompt_tokens
            self._reasoning += usage.reasoning_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; each counts once, however many samples it has."""
        return sum(self._prompt)

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return 0 if self.wanted.hides_output else sum(self.output)

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }


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
