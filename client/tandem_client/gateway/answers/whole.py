"""Collects the messages of the service into one answer. Pure: messages in, JSON out."""

import json
from typing import Any

from tandem.v1 import inference_pb2

from tandem_client.gateway.answers import logprobs
from tandem_client.gateway.answers.frame import Frame, finish_reason, stop_reason
from tandem_client.gateway.answers.logprobs import TokenLogprob

_CHAT, _COMPLETION = "chat.completion", "text_completion"


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
            self.logprobs += logprobs.tokens_of(delta.token_ids, delta.logprobs, num_top)
        for call in delta.tool_calls:
            self.calls.setdefault(call.index, (call.id, call.name, []))[2].append(call.arguments)


class Whole:
    """One answer."""

    def __init__(self, frame: Frame) -> None:
        self._frame, self._wanted = frame, frame.wanted
        self._choices = [Choice() for _ in range(len(frame.wanted.requests) * frame.wanted.num_samples)]

    def message(self, idx: int, response: inference_pb2.GenerateResponse) -> None:
        """Takes one message of call `idx`."""
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                self._choice(idx, delta.sample_idx).add(delta, self._wanted.num_top)
            case "finished":
                self._choice(idx, response.finished.sample_idx).finished = response.finished
            case "prompt_info":
                if self._wanted.num_prompt_top is not None:
                    self._frame.prompts[idx].add(response.prompt_info, self._wanted.num_prompt_top)
            case "summary":
                self._frame.tally.summary(idx, response.summary.usage)
            case _:
                pass

    def body(self) -> bytes:
        """The answer as JSON."""
        wanted = self._wanted
        shape = self._chat if wanted.is_chat else self._completion
        whole = self._frame.head(_CHAT if wanted.is_chat else _COMPLETION)
        whole["choices"] = [shape(i, choice) for i, choice in enumerate(self._choices)]
        whole["usage"] = self._frame.tally.as_json()
        if wanted.is_chat and wanted.num_prompt_top is not None:
            whole["prompt_logprobs"] = logprobs.of_prompt(self._frame.prompts[0].logprobs)
        return json.dumps(whole).encode()

    def _choice(self, idx: int, sample_idx: int) -> Choice:
        return self._choices[idx * self._wanted.num_samples + sample_idx]

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
        if self._wanted.num_top is not None:
            found["logprobs"] = logprobs.of_chat(choice.logprobs)
        return found

    def _completion(self, i: int, choice: Choice) -> dict[str, Any]:
        wanted, prompt = self._wanted, self._frame.prompts[i // self._wanted.num_samples]
        text = "" if wanted.hides_output else "".join(choice.texts)
        found = self._ended(i, choice) | {"text": f"{prompt.text}{text}" if wanted.is_echo else text}
        tokens = [] if wanted.hides_output else choice.logprobs
        if wanted.num_top is not None:
            parts = [(0, prompt.scored), (len(prompt.text), tokens)] if wanted.is_echo else [(0, tokens)]
            found["logprobs"] = logprobs.of_completion(parts, with_top=wanted.num_top > 0)
        if wanted.num_prompt_top is not None and not wanted.is_echo:
            found["prompt_logprobs"] = logprobs.of_prompt(prompt.logprobs)
        return found

    def _ended(self, i: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": i,
            "logprobs": None,
            "finish_reason": finish_reason(choice.finished, has_calls=bool(choice.calls)),
            "stop_reason": stop_reason(choice.finished),
        }
        if self._wanted.with_token_ids:
            found["token_ids"] = choice.token_ids
        return found
