"""Writes the messages of the service as the chunks of a stream, `data: {…}` each, or as one answer.

Owns what both have in common: id, model, time, prompts, usage, why a choice ended, and logprobs in the three shapes of
OpenAI's and vLLM's APIs. Pure: messages in, bytes out. A delta of a stream that has only text, by far the most
frequent, is joined from parts that were made once; everything else is made by `json.dumps`.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from tandem.v1 import chat_pb2, inference_pb2

from tandem_client.gateway.openai.wanted import Wanted

# JSON has no infinity; vLLM has the same bound.
_LOWEST = -9999.0

_COMPLETION_ID, _CHAT_ID = "cmpl-", "chatcmpl-"
STOP, LENGTH, TOOL_CALLS, FUNCTION_CALL = "stop", "length", "tool_calls", "function_call"
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

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logprob, and what it adds to the text: see tandem.v1.TokenPiece."""

    token_id: int
    # None: the first token of a prompt.
    logprob: float | None
    text: str
    data: bytes
    # The most probable tokens in its place.
    top: "tuple[Scored, ...]" = ()

    @property
    def num_chars(self) -> int:
        return len(self.text) if self.data else 0


def tokens_of(ids: Sequence[int], logprobs: inference_pb2.Logprobs, num_top: int) -> list[Scored]:
    """Joins ids and their packed logprobs; keeps the first `num_top` alternatives of each."""
    tokens, k = list[Scored](), logprobs.top_k
    kept = min(k, num_top)
    for i, (token_id, logprob) in enumerate(zip(ids, logprobs.logprobs, strict=True)):
        top_ids, top = logprobs.top_token_ids[i * k : i * k + kept], logprobs.top_logprobs[i * k : i * k + kept]
        alternatives = tuple(
            Scored(top_id, max(_LOWEST, value), *_piece(top_id, logprobs.top_pieces, i * k + rank))
            for rank, (top_id, value) in enumerate(zip(top_ids, top, strict=True))
        )
        tokens.append(Scored(token_id, max(_LOWEST, logprob), *_piece(token_id, logprobs.pieces, i), alternatives))
    return tokens


def of_chat(tokens: Sequence[Scored]) -> dict[str, object]:
    """The `logprobs` of a chat's choice. A token that is left out of the text has no bytes."""

    def entry(token: Scored) -> dict[str, object]:
        data = list(token.data) if token.data else None
        return {"token": token.text, "logprob": token.logprob, "bytes": data}

    content = [{**entry(token), "top_logprobs": [entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def of_completion(parts: Sequence[tuple[int, Sequence[Scored]]], *, with_top: bool) -> dict[str, object]:
    """The `logprobs` of a completion's choice: parts of the text, each with the character at which it begins."""
    columns: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for offset, tokens in parts:
        for token in tokens:
            columns["text_offset"].append(offset)
            columns["tokens"].append(token.text)
            columns["token_logprobs"].append(token.logprob)
            columns["top_logprobs"].append(None if token.logprob is None else _by_text(token))
            offset += token.num_chars
    return {**columns} if with_top else {**columns, "top_logprobs": None}


def of_prompt(tokens: Sequence[Scored]) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`. The rank of a token that is not among the most probable ones is unknown."""
    positions: list[dict[str, object] | None] = [None]
    for token in tokens:
        entries: dict[str, object] = {}
        for rank, top in enumerate(token.top, 1):
            entries[str(top.token_id)] = {"logprob": top.logprob, "rank": rank, "decoded_token": top.text}
        itself = {"logprob": token.logprob, "rank": None, "decoded_token": token.text}
        entries.setdefault(str(token.token_id), itself)
        positions.append(entries)
    return positions


def _by_text(token: Scored) -> dict[str, float | None]:
    """Logprobs by text, the token's own too. Of tokens with equal texts one has the text, first the token itself."""
    logprobs: dict[str, float | None] = {}
    for top in token.top:
        is_taken = top.text in logprobs or (top.text == token.text and top.token_id != token.token_id)
        logprobs[_name(top.token_id) if is_taken else top.text] = top.logprob
    logprobs.setdefault(token.text, token.logprob)
    return logprobs


def _piece(token_id: int, pieces: Sequence[inference_pb2.TokenPiece], idx: int) -> tuple[str, bytes]:
    """(text, bytes). A model without a tokenizer has no pieces and no text."""
    return (pieces[idx].text, pieces[idx].data) if pieces else (_name(token_id), b"")


def _name(token_id: int) -> str:
    """What vLLM writes for an id without a text."""
    return f"token_id:{token_id}"


@dataclass(slots=True, kw_only=True)
class ShownPrompt:
    """`text` and `token_ids` are empty where the answer does not show them."""

    text: str = ""
    token_ids: Sequence[int] = ()
    # The logprobs of all tokens but the first, as far as they have come.
    logprobs: list[Scored] = field(default_factory=list[Scored])
    first: inference_pb2.TokenPiece | None = None

    def add(self, info: inference_pb2.PromptInfo, num_top: int) -> None:
        """Takes the next piece of the prompt's logprobs."""
        ids = self.token_ids[info.start : info.start + len(info.logprobs.logprobs)]
        self.logprobs += tokens_of(ids, info.logprobs, num_top)
        if info.HasField("first"):
            self.first = info.first

    @property
    def scored(self) -> list[Scored]:
        """All tokens; the first has no logprob."""
        # A prompt of one token has no logprobs, and that token has its text.
        piece = self.first or inference_pb2.TokenPiece(text=self.text, data=self.text.encode())
        first = [Scored(token_id, None, piece.text, piece.data) for token_id in self.token_ids[:1]]
        return first + self.logprobs


@dataclass(kw_only=True, eq=False)
class AnswerWriter:
    """A whole answer: messages in, in order, and bytes out. Its choices have the form of a stream's, by one delta.

    Until the Summary of a call has come, its tokens are those that have come.
    """

    wanted: Wanted
    request_id: str
    model: str
    # One for each call of the service, in order, and the number of its tokens.
    prompts: Sequence[ShownPrompt]
    prompt_lengths: list[int]

    def __post_init__(self) -> None:
        is_chat, num_calls = self.wanted.is_chat, len(self.wanted.requests)
        prefix, kind = (_CHAT_ID, "chat.completion") if is_chat else (_COMPLETION_ID, "text_completion")
        if is_chat and self.wanted.is_stream:
            kind += ".chunk"
        # The first members of an answer or a chunk.
        self._head: dict[str, object] = {
            "id": f"{prefix}{self.request_id}", "object": kind, "created": int(time.time()), "model": self.model,
        }  # fmt: skip
        self._choices = [Choice() for _ in range(num_calls * self.wanted.num_samples)]
        # By call.
        self._output = [0] * num_calls
        self._cached = self._reasoning = 0

    def message(self, idx: int, response: inference_pb2.GenerateResponse) -> bytes:
        """Takes a message of call `idx`. Returns what a stream sends of it; may be empty."""
        first = idx * self.wanted.num_samples
        match response.WhichOneof("event"):
            case "delta":
                return self._delta(idx, first + response.delta.sample_idx, response.delta)
            case "finished":
                return self._finished(first + response.finished.sample_idx, response.finished)
            case "waiting":
                # Clients ignore lines that begin with a colon.
                return f": waiting: {' '.join(response.waiting.message.split())}\n\n".encode()
            case "prompt_info" if self.wanted.num_prompt_top is not None:
                self.prompts[idx].add(response.prompt_info, self.wanted.num_prompt_top)
            case "summary":
                usage = response.summary.usage
                self.prompt_lengths[idx], self._output[idx] = usage.prompt_tokens, usage.output_tokens
                self._cached += usage.cached_prompt_tokens
                self._reasoning += usage.reasoning_tokens
            case _:
                pass
        return b""

    def prompt(self, idx: int) -> bytes:
        """What a stream sends of a prompt that is echoed, once its logprobs are complete."""
        return b""

    def closing(self) -> bytes:
        """The whole answer, after every message."""
        wanted, choices = self.wanted, [self._shown(number) for number in range(len(self._choices))]
        whole = {**self._head, "choices": choices, "usage": self._usage()}
        if wanted.is_chat and wanted.num_prompt_top is not None:
            whole["prompt_logprobs"] = of_prompt(self.prompts[0].logprobs)
        return json.dumps(whole).encode()

    def _delta(self, idx: int, number: int, delta: inference_pb2.Delta) -> bytes:
        choice = self._choices[number]
        if not self.wanted.hides_output:
            choice.texts.append(delta.text)
            choice.reasoning.append(delta.reasoning)
            choice.joined.MergeFrom(delta)
        return b""

    def _finished(self, number: int, finished: inference_pb2.Finished) -> bytes:
        self._choices[number].finished = finished
        return b""

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts; each counts once for all its samples."""
        return sum(self.prompt_lengths)

    @property
    def output_tokens(self) -> int:
        return 0 if self.wanted.hides_output else sum(self._output)

    def _usage(self) -> dict[str, object]:
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }

    def _content(self, number: int, delta: inference_pb2.Delta, prompt: ShownPrompt | None = None) -> dict[str, Any]:
        """What a delta adds to choice `number`, behind the prompt that it echoes."""
        wanted, choice = self.wanted, self._choices[number]
        content: dict[str, Any] = {}
        tokens = tokens_of(delta.token_ids, delta.logprobs, wanted.num_top or 0) if wanted.num_top is not None else []
        if delta.tool_calls:
            choice.has_calls = True
        if wanted.is_chat:
            content["delta"], logprobs = self._said(delta), of_chat(tokens)
        else:
            content["text"], parts = delta.text, [(choice.offset, tokens)]
            if prompt is not None:
                content["text"] = f"{prompt.text}{delta.text}"
                choice.offset, parts = len(prompt.text), [(0, prompt.scored), (len(prompt.text), tokens)]
            choice.offset += sum(token.num_chars for token in tokens)
            logprobs = of_completion(parts, with_top=bool(wanted.num_top))
        content["logprobs"] = None if wanted.num_top is None else logprobs
        if wanted.with_token_ids:
            content["token_ids"] = list(delta.token_ids)
        return content

    def _said(self, delta: inference_pb2.Delta) -> dict[str, object]:
        """What a delta adds to the message of a chat."""
        message: dict[str, object] = {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.text:
            message["content"] = delta.text
        if delta.tool_calls:
            if self.wanted.calls_function:
                message["function_call"] = _function(delta.tool_calls)
            else:
                message["tool_calls"] = [_call(call) for call in delta.tool_calls]
        return message

    def _shown(self, number: int) -> dict[str, Any]:
        wanted, choice, prompt = self.wanted, self._choices[number], self.prompts[number // self.wanted.num_samples]
        delta = choice.joined
        delta.text, delta.reasoning = "".join(choice.texts), "".join(choice.reasoning)
        calls = _joined(delta.tool_calls)
        del delta.tool_calls[:]
        delta.tool_calls.extend(calls)
        content = self._content(number, delta, prompt if wanted.is_echo else None)
        if wanted.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": None if calls else "", "refusal": None}
            content["message"] = message | content.pop("delta")
            for call in content["message"].get("tool_calls", ()):
                del call["index"]
        elif wanted.num_prompt_top is not None and not wanted.is_echo:
            content["prompt_logprobs"] = of_prompt(prompt.logprobs)
        return {"index": number, **content, **self._end(choice, choice.finished)}

    def _end(self, choice: "Choice", finished: inference_pb2.Finished) -> dict[str, object]:
        """Why a choice has ended. What was cut short by a limit of any kind, or by an operator, is `length`."""
        if self.wanted.hides_output:
            # The only token is the gateway's own.
            return {"finish_reason": LENGTH, "stop_reason": None}
        reason = LENGTH
        if finished.reason in _STOPS:
            of_calls = FUNCTION_CALL if self.wanted.calls_function else TOOL_CALLS
            reason = of_calls if choice.has_calls else STOP
        return {"finish_reason": reason, "stop_reason": stop_reason(finished)}


@dataclass(slots=True, eq=False)
class Choice:
    """One sample of one prompt, as far as it has come."""

    # Where its next token begins, in characters. The token's text may be held back.
    offset: int = 0
    has_calls: bool = False
    # What a whole answer collects: its texts, and all else of its deltas in one.
    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    joined: inference_pb2.Delta = field(default_factory=inference_pb2.Delta)
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)


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


def _call(call: chat_pb2.ToolCallDelta) -> dict[str, object]:
    """A piece of a call; the first one has its name."""
    if call.id or call.name:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _function(calls: Sequence[chat_pb2.ToolCallDelta]) -> dict[str, str]:
    """The pieces of the first call in the old form, which has no place for a second one."""
    first = [call for call in calls if call.index == 0]
    made = {"arguments": "".join(call.arguments for call in first)}
    return {"name": first[0].name, **made} if first and first[0].name else made


class Chunks(AnswerWriter):
    """The answer as a stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = self.wanted
        self._text = json.dumps(self._head)[:-1]
        self._is_plain = not (
            wanted.num_top is not None
            or wanted.usage.continuous_usage_stats
            or wanted.with_token_ids
            or wanted.hides_output
        )
        middle, self._close = ('"delta": {"content": ', "}") if wanted.is_chat else ('"text": ', "")
        self._parts = [
            f'data: {self._text}, "choices": [{{"index": {number}, {middle}' for number in range(len(self._choices))
        ]

    def opening(self) -> bytes:
        """The first chunks, before any token: the role of a chat's message."""
        if not self.wanted.is_chat:
            return b""
        first = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(number, first) for number in range(len(self._choices)))

    def prompt(self, idx: int) -> bytes:
        """The chunks that echo a prompt."""
        shown, num_samples = self.prompts[idx], self.wanted.num_samples
        numbers = range(idx * num_samples, (idx + 1) * num_samples)
        return b"".join(self._chunk(number, self._content(number, inference_pb2.Delta(), shown)) for number in numbers)

    def closing(self) -> bytes:
        """What comes last, after every message."""
        if not self.wanted.usage.include_usage:
            return DONE
        return f'data: {self._text}, "choices": [], "usage": {json.dumps(self._usage())}}}\n\n'.encode() + DONE

    def _delta(self, idx: int, number: int, delta: inference_pb2.Delta) -> bytes:
        if self._is_plain and not delta.reasoning and not delta.tool_calls:
            if not delta.text:
                return b""
            return (
                f"{self._parts[number]}{quoted(delta.text)}{self._close}"
                ', "logprobs": null, "finish_reason": null}]}\n\n'
            ).encode("ascii")  # fmt: skip
        self._output[idx] += len(delta.token_ids)
        is_empty = not (delta.text or delta.reasoning or delta.tool_calls or delta.token_ids)
        if self.wanted.hides_output or is_empty:
            return b""
        return self._chunk(number, self._content(number, delta))

    def _finished(self, number: int, finished: inference_pb2.Finished) -> bytes:
        empty: dict[str, object] = {"delta": {}} if self.wanted.is_chat else {"text": ""}
        return self._chunk(number, empty | self._end(self._choices[number], finished))

    def _chunk(self, number: int, body: dict[str, Any]) -> bytes:
        whole = {"index": number, "logprobs": None, "finish_reason": None, **body}
        usage = f', "usage": {json.dumps(self._usage())}' if self.wanted.usage.continuous_usage_stats else ""
        return f'data: {self._text}, "choices": [{json.dumps(whole)}]{usage}}}\n\n'.encode()


def _joined(pieces: Sequence[chat_pb2.ToolCallDelta]) -> list[chat_pb2.ToolCallDelta]:
    """One piece of each call."""
    calls, arguments = dict[int, chat_pb2.ToolCallDelta](), dict[int, list[str]]()
    for piece in pieces:
        calls.setdefault(piece.index, piece)
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [
        chat_pb2.ToolCallDelta(index=index, id=first.id, name=first.name, arguments="".join(arguments[index]))
        for index, first in calls.items()
    ]
