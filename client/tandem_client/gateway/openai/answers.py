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
        self._call_reason = FUNCTION_CALL if wanted.calls_function else TOOL_CALLS
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

    def finish_reason(self, finished: inference_pb2.Finished, *, has_calls: bool) -> str:
        """OpenAI's finish_reason. What was cut short by a limit of any kind, or by an operator, is `length`."""
        if finished.reason in _STOPS:
            return self._call_reason if has_calls else STOP
        return LENGTH

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


class Chunks(Frame):
    """One stream."""

    KINDS = "chat.completion.chunk", "text_completion"

    def _begin(self) -> None:
        wanted = self.wanted
        self._is_chat = wanted.is_chat
        self._head = json.dumps(self.head)[:-1]
        self._is_plain = not (
            wanted.num_top is not None
            or wanted.usage.continuous_usage_stats
            or wanted.with_token_ids
            or wanted.hides_output
        )
        middle = '"delta": {"content": ' if wanted.is_chat else '"text": '
        self._parts = [f'data: {self._head}, "choices": [{{"index": {i}, {middle}' for i in range(self.num_choices)]
        # Where the next token of each choice begins, in characters. Its text may be held back.
        self._offsets = [0] * self.num_choices
        self._called = [False] * self.num_choices

    def opening(self) -> bytes:
        """The first chunks, before any token: the role of a chat's message."""
        if not self._is_chat:
            return b""
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, {"delta": first}) for i in range(self.wanted.num_samples))

    def message(self, idx: int, response: inference_pb2.GenerateResponse) -> bytes:
        """The chunks for one message of call `idx`; empty if there is nothing to tell."""
        match response.WhichOneof("event"):
            case "delta":
                return self._delta(idx, response.delta)
            case "finished":
                return self._finished(idx, response.finished)
            case "waiting":
                # Clients ignore lines that begin with a colon.
                return f": waiting: {' '.join(response.waiting.message.split())}\n\n".encode()
            case _:
                self.note(idx, response)
                return b""

    def prompt(self, idx: int) -> bytes:
        """The chunks that echo a prompt; they come once its logprobs are complete."""
        shown, found = self.prompts[idx], b""
        for sample in range(self.wanted.num_samples):
            choice = idx * self.wanted.num_samples + sample
            body: dict[str, object] = {"text": shown.text}
            if self.wanted.num_top is not None:
                body["logprobs"] = of_completion([(0, shown.scored)], with_top=self.wanted.num_top > 0)
            self._offsets[choice] = len(shown.text)
            found += self._chunk(choice, body)
        return found

    def closing(self) -> bytes:
        """The last chunks, after every message."""
        if not self.wanted.usage.include_usage:
            return DONE
        usage = json.dumps(self.usage())
        return f'data: {self._head}, "choices": [], "usage": {usage}}}\n\n'.encode() + DONE

    def _delta(self, idx: int, delta: inference_pb2.Delta) -> bytes:
        choice = idx * self.wanted.num_samples + delta.sample_idx
        if self._is_plain and not delta.reasoning and not delta.tool_calls:
            if not delta.text:
                return b""
            close = "}" if self._is_chat else ""
            return (
                f"{self._parts[choice]}{quoted(delta.text)}{close}"
                ', "logprobs": null, "finish_reason": null}]}\n\n'
            ).encode("ascii")  # fmt: skip
        self.output[idx] += len(delta.token_ids)
        if self.wanted.hides_output:
            return b""
        body: dict[str, Any] = self._chat_delta(choice, delta) if self._is_chat else {"text": delta.text}
        if self.wanted.num_top is not None:
            body["logprobs"] = self._logprobs(choice, delta)
        if self.wanted.with_token_ids:
            body["token_ids"] = list(delta.token_ids)
        is_empty = not (delta.text or delta.reasoning or delta.tool_calls or delta.token_ids)
        return b"" if is_empty else self._chunk(choice, body)

    def _chat_delta(self, choice: int, delta: inference_pb2.Delta) -> dict[str, Any]:
        found: dict[str, object] = {}
        if delta.reasoning:
            found["reasoning_content"] = delta.reasoning
        if delta.text:
            found["content"] = delta.text
        if delta.tool_calls:
            self._called[choice] = True
            if self.wanted.calls_function:
                found["function_call"] = _function(delta.tool_calls)
            else:
                found["tool_calls"] = [_call(call) for call in delta.tool_calls]
        return {"delta": found}

    def _logprobs(self, choice: int, delta: inference_pb2.Delta) -> dict[str, object] | None:
        num_top = self.wanted.num_top or 0
        tokens = tokens_of(delta.token_ids, delta.logprobs, num_top)
        if self._is_chat:
            return of_chat(tokens)
        offset = self._offsets[choice]
        self._offsets[choice] += sum(token.num_chars for token in tokens)
        return of_completion([(offset, tokens)], with_top=num_top > 0)

    def _finished(self, idx: int, finished: inference_pb2.Finished) -> bytes:
        choice = idx * self.wanted.num_samples + finished.sample_idx
        body: dict[str, object] = {"delta": {}} if self._is_chat else {"text": ""}
        body["finish_reason"] = self.finish_reason(finished, has_calls=self._called[choice])
        body["stop_reason"] = stop_reason(finished)
        return self._chunk(choice, body)

    def _chunk(self, choice: int, body: dict[str, Any]) -> bytes:
        whole = {"index": choice, "logprobs": None, "finish_reason": None, **body}
        usage = f', "usage": {json.dumps(self.usage())}' if self.wanted.usage.continuous_usage_stats else ""
        return f'data: {self._head}, "choices": [{json.dumps(whole)}]{usage}}}\n\n'.encode()


def _call(call: chat_pb2.ToolCallDelta) -> dict[str, object]:
    if call.id or call.name:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _function(calls: Sequence[chat_pb2.ToolCallDelta]) -> dict[str, str]:
    """The pieces of the first call in the old form, which has no place for a second one."""
    first = [call for call in calls if call.index == 0]
    made = {"arguments": "".join(call.arguments for call in first)}
    return {"name": first[0].name, **made} if first and first[0].name else made


@dataclass(slots=True)
class Choice:
    """One sample of one prompt, as far as it has come."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    # Of each call: id, name, pieces of its arguments.
    calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict[int, tuple[str, str, list[str]]])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)

    def add(self, delta: inference_pb2.Delta, num_top: int | None) -> None:
        """Takes the next delta."""
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.token_ids += delta.token_ids
        if num_top is not None:
            self.logprobs += tokens_of(delta.token_ids, delta.logprobs, num_top)
        for call in delta.tool_calls:
            self.calls.setdefault(call.index, (call.id, call.name, []))[2].append(call.arguments)


class Whole(Frame):
    """One answer."""

    KINDS = "chat.completion", "text_completion"

    def _begin(self) -> None:
        self._choices = [Choice() for _ in range(self.num_choices)]

    def message(self, idx: int, response: inference_pb2.GenerateResponse) -> None:
        """Takes one message of call `idx`."""
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                self._choice(idx, delta.sample_idx).add(delta, self.wanted.num_top)
            case "finished":
                self._choice(idx, response.finished.sample_idx).finished = response.finished
            case _:
                self.note(idx, response)

    def body(self) -> bytes:
        """The answer as JSON."""
        wanted = self.wanted
        shape = self._chat if wanted.is_chat else self._completion
        whole: dict[str, object] = {**self.head}
        whole["choices"] = [shape(i, choice) for i, choice in enumerate(self._choices)]
        whole["usage"] = self.usage()
        if wanted.is_chat and wanted.num_prompt_top is not None:
            whole["prompt_logprobs"] = of_prompt(self.prompts[0].logprobs)
        return json.dumps(whole).encode()

    def _choice(self, idx: int, sample_idx: int) -> Choice:
        return self._choices[idx * self.wanted.num_samples + sample_idx]

    def _chat(self, i: int, choice: Choice) -> dict[str, Any]:
        wanted, text = self.wanted, "".join(choice.texts)
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["content"] = text or None
            calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
                for call_id, name, pieces in choice.calls.values()
            ]
            message |= {"function_call": calls[0]["function"]} if wanted.calls_function else {"tool_calls": calls}
        found = self._ended(i, choice) | {"message": message}
        if wanted.num_top is not None:
            found["logprobs"] = of_chat(choice.logprobs)
        return found

    def _completion(self, i: int, choice: Choice) -> dict[str, Any]:
        wanted, prompt = self.wanted, self.prompts[i // self.wanted.num_samples]
        text = "" if wanted.hides_output else "".join(choice.texts)
        found = self._ended(i, choice) | {"text": f"{prompt.text}{text}" if wanted.is_echo else text}
        tokens = [] if wanted.hides_output else choice.logprobs
        if wanted.num_top is not None:
            parts = [(0, prompt.scored), (len(prompt.text), tokens)] if wanted.is_echo else [(0, tokens)]
            found["logprobs"] = of_completion(parts, with_top=wanted.num_top > 0)
        if wanted.num_prompt_top is not None and not wanted.is_echo:
            found["prompt_logprobs"] = of_prompt(prompt.logprobs)
        return found

    def _ended(self, i: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": i,
            "logprobs": None,
            "finish_reason": self.finish_reason(choice.finished, has_calls=bool(choice.calls)),
            "stop_reason": stop_reason(choice.finished),
        }
        if self.wanted.with_token_ids:
            found["token_ids"] = choice.token_ids
        return found
