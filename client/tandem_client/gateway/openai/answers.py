"""Writes the messages of the service as the chunks of a stream, `data: {…}` each, or as one answer.

Pure: messages in, bytes out. A delta of a stream that has only text, by far the most frequent, is joined from parts
that were made once; everything else is made by `json.dumps`.
"""

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from tandem.v1 import chat_pb2, inference_pb2

from tandem_client.gateway.openai.frame import (
    Frame,
    TokenLogprob,
    finish_reason,
    of_chat,
    of_completion,
    of_prompt,
    stop_reason,
    tokens_of,
)

DONE = b"data: [DONE]\n\n"


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
        body["finish_reason"] = finish_reason(finished, has_calls=self._called[choice])
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


class Choice:
    """One sample of one prompt, as far as it has come."""

    __slots__ = ("calls", "finished", "logprobs", "reasoning", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        # Of each call: id, name, pieces of its arguments.
        self.calls: dict[int, tuple[str, str, list[str]]] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finished = inference_pb2.Finished()

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
        text = "".join(choice.texts)
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
                for call_id, name, pieces in choice.calls.values()
            ]
        found = self._ended(i, choice) | {"message": message}
        if self.wanted.num_top is not None:
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
            "finish_reason": finish_reason(choice.finished, has_calls=bool(choice.calls)),
            "stop_reason": stop_reason(choice.finished),
        }
        if self.wanted.with_token_ids:
            found["token_ids"] = choice.token_ids
        return found
