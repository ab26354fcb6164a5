"""The messages that have been read from one stream, and the check that they follow the order of the API.

Both streams use it. It does not read the stream itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tandem.v1 import inference_pb2

from tandem_client import types
from tandem_client.errors import ProtocolError
from tandem_client.wire import messages
from tandem_contract.plural import counted, numbered

NOTHING = types.SampleOffset()


class Sample:
    """One completion of a request, as far as it has been read. Of a resumed one, `before` was read elsewhere."""

    __slots__ = (
        "_calls", "_reasoning", "_texts", "before", "finished", "idx", "logprobs", "num_tokens", "token_ids"
    )  # fmt: skip

    def __init__(self, idx: int, before: types.SampleOffset = NOTHING) -> None:
        self.idx = idx
        self.before = before
        # Empty if ids were not requested. `num_tokens` is still correct once the sample is finished.
        self.token_ids: list[int] = []
        # One per token; empty if they were not requested.
        self.logprobs: list[types.TokenLogprob] = []
        # None until the sample ended.
        self.finished: types.Finished | None = None
        # With those of `before`.
        self.num_tokens = before.token_ids
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        # The pieces of each tool call, by its number in the answer.
        self._calls: dict[int, list[types.ToolCallDelta]] = {}

    def __repr__(self) -> str:
        state = f"ended by {self.finished.reason}" if self.finished else "running"
        return f"<Sample {self.idx} {state}, {counted(self.num_tokens, 'token')}>"

    @property
    def text(self) -> str:
        """All text so far, in a chat the content; without that of `before`."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """All reasoning so far; without that of `before`."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[types.ToolCall, ...]:
        """The tool calls so far, without what `before` has of them; the last one may be incomplete."""
        return tuple(
            types.ToolCall(
                id="".join(piece.id for piece in pieces),
                name="".join(piece.name for piece in pieces),
                arguments="".join(piece.arguments for piece in pieces),
            )
            for _, pieces in sorted(self._calls.items())
        )

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the assistant, to append to the conversation."""
        calls = self.tool_calls
        content = self.text or (None if calls else "")
        return types.ChatMessage(
            role="assistant", content=content, reasoning=self.reasoning, tool_calls=calls
        ).as_dict()

    @property
    def offset(self) -> types.SampleOffset:
        """How much of the sample has been read, here and elsewhere."""
        return types.SampleOffset(
            token_ids=self.before.token_ids + len(self.token_ids),
            text_chars=self.before.text_chars + sum(map(len, self._texts)),
            reasoning_chars=self.before.reasoning_chars + sum(map(len, self._reasoning)),
            # The numbers of calls go on from those of `before`.
            tool_calls=max(self.before.tool_calls, *(index + 1 for index in self._calls), 0),
            tool_argument_chars=self.before.tool_argument_chars
            + sum(len(piece.arguments) for pieces in self._calls.values() for piece in pieces),
        )

    def add(self, delta: types.Delta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.num_tokens += len(delta.token_ids)
        if delta.text:
            self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            self._calls.setdefault(piece.index, []).append(piece)


class Transcript:
    """What has been read of a stream's messages, in order. A stream is one of these that reads them by itself."""

    def __init__(
        self, request: inference_pb2.GenerateRequest, offsets: Sequence[types.SampleOffset] | None = None
    ) -> None:
        """`offsets`: what was read elsewhere of each sample of a resumed stream; its options are not known."""
        # The first message; None before it has come.
        self.accepted: types.Accepted | None = None
        self._offsets = offsets or ()
        # The part of each sample that has been read: text, token ids, logprobs, how it ended. One sample until the
        # Accepted message gives the number.
        self.samples = (self._new_sample(0),)
        # The last message; None before it has come.
        self.summary: types.Summary | None = None
        # Why the request makes no progress, as the service said last; None while output comes. `on_waiting` gets each
        # value when it is read.
        self.waiting: types.Waiting | None = None
        self.on_waiting: Callable[[types.Waiting], object] | None = None
        # The prompt's logprobs, if requested, or None; complete once the first delta has come.
        self.prompt_info: types.PromptInfo | None = None
        output = request.output
        self._with_ids = offsets is None and (output.want_token_ids or not output.HasField("want_token_ids"))
        self._with_logprobs = output.HasField("logprobs")

    def _absorb(self, message: inference_pb2.GenerateResponse) -> types.Delta | None:
        """Reads one message; returns the delta in it, if there is one.

        Raises ProtocolError if something is missing or repeated: such a completion is not complete.
        """
        match message.WhichOneof("event"):
            case "accepted":
                self.accepted = messages.accepted(message.accepted)
                others = range(1, self.accepted.sampling.num_samples)
                self.samples = (self.samples[0], *(self._new_sample(idx) for idx in others))
            case "prompt_info":
                self._absorb_prompt(messages.prompt_info(message.prompt_info))
            case "delta":
                delta = messages.delta(message.delta)
                self.waiting = None
                self._absorb_delta(delta)
                return delta
            case "finished":
                finished = messages.finished(message.finished)
                sample = self._sample(finished.sample_idx)
                sample.finished, sample.num_tokens = finished, finished.output_tokens
            case "waiting":
                self.waiting = messages.waiting(message.waiting)
                if self.on_waiting is not None:
                    self.on_waiting(self.waiting)
            case "summary":
                self.summary = messages.summary(message.summary)
            case _:
                pass  # An event that is newer than this client.
        return None

    def _is_repeated(self, message: inference_pb2.GenerateResponse) -> bool:
        """Whether a message of a resumed stream was in the stream before."""
        match message.WhichOneof("event"):
            case "accepted":
                return self.accepted is not None
            case "finished":
                return self._sample(message.finished.sample_idx).finished is not None
            case _:
                return False

    def _check_end(self) -> None:
        """Checks the end of the stream. Raises ProtocolError if a message that belongs there is missing."""
        if self.summary is None:
            raise ProtocolError("the stream ended without its Summary")
        missing = next((sample.idx for sample in self.samples if sample.finished is None), None)
        if missing is not None:
            raise ProtocolError(f"the stream ended without the Finished of sample {missing}")

    def _sample(self, idx: int) -> Sample:
        if idx >= len(self.samples):
            raise ProtocolError(f"a message names sample {idx}; the request has {len(self.samples)}")
        return self.samples[idx]

    def _new_sample(self, idx: int) -> Sample:
        return Sample(idx, self._offsets[idx] if idx < len(self._offsets) else NOTHING)

    def _absorb_prompt(self, info: types.PromptInfo) -> None:
        before = self.prompt_info
        if before is not None:
            due = before.start + len(before.logprobs)
            if info.start != due:
                raise ProtocolError(f"logprobs of the prompt start at token {info.start}; expected {due}")
            info = replace(before, logprobs=before.logprobs + info.logprobs)
        self.prompt_info = info if info.logprobs else None

    def _absorb_delta(self, delta: types.Delta) -> None:
        sample = self._sample(delta.sample_idx)
        if self._with_ids or delta.token_ids:
            if delta.token_offset != sample.num_tokens:
                raise ProtocolError(f"a delta starts at token {delta.token_offset}; expected {sample.num_tokens}")
            num_logprobs = len(delta.token_ids) if self._with_logprobs else 0
            if len(delta.logprobs) != num_logprobs:
                raise ProtocolError(
                    f"a delta of {numbered(len(delta.token_ids), 'token')} has "
                    f"{numbered(len(delta.logprobs), 'logprob')};"
                    f" expected {num_logprobs}"
                )
        sample.add(delta)
