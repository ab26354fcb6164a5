"""The request of one stream, and everything that the core has sent to it, compared with the oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tandem.v1.inference_pb2 import SamplingParams

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.rigs.oracle import Completion, complete, logprobs
from tests.rigs.resources import source_of
from tests.rigs.sampling import Logprob, Settings


def settings_of(submit: ev.Submit, sample_idx: int) -> Settings:
    """Returns the sampling settings of one sample for the oracle."""
    return Settings.of(SamplingParams.FromString(submit.sampling), sample_idx)


def completion(
    submit: ev.Submit, sample_idx: int, shape: Shape, version_of: Callable[[int], str] = lambda _: ""
) -> Completion:
    """Returns the oracle's completion of one sample."""
    return complete(
        submit.prompt.tolist(),
        max_new_tokens=submit.max_new_tokens,
        vocab=shape.sampled_vocab,
        eos_token_ids=shape.eos_token_ids,
        settings=settings_of(submit, sample_idx),
        min_new_tokens=submit.min_new_tokens,
        stop_token_ids=submit.stop_token_ids,
        ignore_eos=submit.ignore_eos,
        constraint=source_of(submit),
        version_of=version_of,
    )


def rows_of(values: fx.Logprobs, top_k: int | None = None) -> list[Logprob]:
    """Returns the logprobs of an effect, one per token, with `top_k` alternatives; None means all."""
    lines = zip(values.logprobs.tolist(), values.top_token_ids.tolist(), values.top_logprobs.tolist(), strict=True)
    return [
        Logprob(logprob=own, top=tuple(zip(ids[:top_k], logprobs[:top_k], strict=True))) for own, ids, logprobs in lines
    ]


@dataclass(slots=True)
class Stream:
    """The request of one stream, and everything that the core has sent to the stream."""

    submit: ev.Submit
    sample_idx: int = 0
    admitted: bool = False
    rejected: fx.Rejected | None = None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    prompt_logprobs: list[Logprob] = field(default_factory=list[Logprob])
    end: fx.End | None = None
    replaced: bool = False
    _expected: tuple[Shape, Completion] | None = None

    def expected(self, shape: Shape) -> Completion:
        """Returns the oracle's completion, which does not depend on the world."""
        if self._expected is None or self._expected[0] != shape:
            self._expected = shape, completion(self.submit, self.sample_idx, shape)
        return self._expected[1]

    @property
    def ended(self) -> fx.End:
        """The end. Raises AssertionError if the request has not ended."""
        assert self.end is not None, f"{self.submit.request_id} has not ended"
        return self.end

    def versions(self) -> list[str]:
        """Returns the version of the weights of each token, as the end names it."""
        spans = self.ended.stats.weights
        starts = [span.from_token for span in spans]
        assert not spans or (starts[0] == 0 and starts == sorted(set(starts)))
        return [
            next((span.version for span in reversed(spans) if span.from_token <= n), "")
            for n in range(len(self.tokens))
        ]

    def take(self, output: fx.StepOutput, number: int) -> None:
        """Appends what an effect contains for this stream. Raises AssertionError if it is out of order."""
        assert self.admitted and self.rejected is None
        assert self.end is None, f"stream {number}: something after its end"
        assert not self.replaced, f"stream {number}: something after another reader has come"
        for piece in output.prompt_logprobs:
            if piece.stream == number:
                self._take_piece(piece)
        entries = np.flatnonzero(output.streams == np.uint64(number)).tolist()
        assert len(entries) <= 1, f"stream {number}: several tokens in one step"
        for entry in entries:
            offset = int(output.offsets[entry])
            assert offset == len(self.tokens), f"stream {number}: offset {offset}, {len(self.tokens)} had come"
            self.tokens.append(int(output.tokens[entry]))
            self._take_logprobs(output.logprobs, entry)

    def _take_piece(self, piece: fx.PromptLogprobs) -> None:
        assert not self.tokens, "prompt logprobs after the first token"
        following = self.submit.prompt_logprobs_from + len(self.prompt_logprobs)
        assert self.sample_idx == 0 and self.submit.prompt_logprobs_from
        assert piece.start == following, f"prompt logprobs from {piece.start} on, {following} come next"
        self.prompt_logprobs += rows_of(piece.values)

    def _take_logprobs(self, logprobs: fx.TokenLogprobs | None, entry: int) -> None:
        wanted = self.submit.num_logprobs
        lines = [] if logprobs is None else np.flatnonzero(logprobs.entries == entry).tolist()
        assert len(lines) == (wanted > 0), f"{len(lines)} logprobs of a token, {wanted} were wanted"
        if logprobs is not None and lines:
            self.logprobs.append(rows_of(logprobs.values, wanted - 1)[lines[0]])

    def check_logprobs(self, shape: Shape) -> None:
        """Checks all logprobs against the oracle, and that all prompt logprobs came before the first token."""
        prompt, vocab_size = self.submit.prompt.tolist(), shape.vocab_size
        wanted, start = self.submit.num_logprobs, self.submit.prompt_logprobs_from
        top_k = max(0, wanted - 1)
        if wanted:
            expected = logprobs([*prompt, *self.tokens], start=len(prompt), vocab_size=vocab_size, top_k=top_k)
            assert self.logprobs == expected
        if not start or self.sample_idx:
            return
        expected = logprobs(prompt, start=start, vocab_size=vocab_size, top_k=top_k)
        assert self.prompt_logprobs == expected[: len(self.prompt_logprobs)]
        # If they are not finite the request fails, and the token of that step may come with its end.
        failed = self.end is not None and self.end.failure is not None
        is_complete = len(self.prompt_logprobs) == len(expected)
        assert not self.tokens or is_complete or failed, "a token before all prompt logprobs"


def streams_in(output: fx.StepOutput) -> list[int]:
    """Returns the streams that the effect has tokens or prompt logprobs for."""
    pieces = (piece.stream for piece in output.prompt_logprobs)
    return list(dict.fromkeys([*pieces, *output.streams.tolist()]))
