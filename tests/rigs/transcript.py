"""The messages of one Generate stream, checked for their promised order.

Owns the rules of order: Accepted, PromptInfo, each sample's Deltas with contiguous offsets and its one Finished,
Summary last. Knows nothing of threads, sockets or the expected tokens.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from tandem.v1 import inference_pb2 as pb

from tests.rigs.sampling import Logprob


def logprobs_of(message: pb.Logprobs) -> list[Logprob]:
    """The logprobs of each token. Raises AssertionError if the arrays' lengths do not agree."""
    count, top_k = len(message.logprobs), message.top_k
    ids, logprobs = list(message.top_token_ids), list(message.top_logprobs)
    assert len(ids) == len(logprobs) == count * top_k, "the number of alternatives is wrong"
    top = list(zip(ids, logprobs, strict=True))
    return [Logprob(logprob=own, top=tuple(top[i * top_k : (i + 1) * top_k])) for i, own in enumerate(message.logprobs)]


@dataclass(slots=True)
class SampleTranscript:
    """One sample of a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    num_deltas: int = 0
    finished: pb.Finished | None = None

    def take(self, delta: pb.Delta) -> None:
        assert self.finished is None, "a Delta after Finished"
        assert delta.token_ids or delta.text or delta.HasField("logprobs"), "an empty Delta"
        if delta.token_ids:
            assert delta.token_offset == len(self.tokens), (
                f"a Delta at offset {delta.token_offset} after {len(self.tokens)} tokens"
            )
        self.tokens.extend(delta.token_ids)
        self.text += delta.text
        self.logprobs += logprobs_of(delta.logprobs)
        self.num_deltas += 1

    @property
    def reason(self) -> str:
        """The finish reason without its prefix: `LENGTH` for FINISH_REASON_LENGTH."""
        assert self.finished is not None, "the stream is not finished"
        return pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_")


@dataclass(slots=True)
class Transcript:
    """Grows with `take`, which raises AssertionError on a message out of order.

    Properties without an index describe sample 0.
    """

    accepted: pb.Accepted | None = None
    samples: dict[int, SampleTranscript] = field(default_factory=lambda: defaultdict(SampleTranscript))
    prompt_start: int = 0
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    waits: list[pb.Waiting] = field(default_factory=list)
    summary: pb.Summary | None = None

    def take(self, message: pb.GenerateResponse) -> None:
        kind = message.WhichOneof("event")
        assert self.summary is None, f"{kind} after Summary"
        assert (kind == "accepted") == (self.accepted is None), f"{kind}, Accepted was {self.accepted is not None}"
        match kind:
            case "accepted":
                self.accepted = message.accepted
            case "prompt_info":
                self._take_prompt(message.prompt_info)
            case "delta":
                self._sample(message.delta.sample_idx).take(message.delta)
            case "waiting":
                assert message.waiting.reason and message.waiting.message and message.waiting.since
                self.waits.append(message.waiting)
            case "finished":
                sample = self._sample(message.finished.sample_idx)
                assert sample.finished is None, "a second Finished"
                assert message.finished.reason != pb.FINISH_REASON_UNSPECIFIED, "Finished without a reason"
                sample.finished = message.finished
            case "summary":
                assert len(self.samples) == self.num_samples, "Summary before every sample had output"
                assert all(sample.finished for sample in self.samples.values()), "Summary before Finished"
                self.summary = message.summary
            case other:
                raise AssertionError(f"an unknown message: {other}")

    def expect_resumed(self) -> None:
        """Prepares for a call that resumes this one: it sends Accepted, Finished and Summary (again)."""
        self.accepted = self.summary = None
        for sample in self.samples.values():
            sample.finished = None

    def _sample(self, idx: int) -> SampleTranscript:
        assert idx < self.num_samples, f"sample {idx} of {self.num_samples}"
        return self.samples[idx]

    def _take_prompt(self, info: pb.PromptInfo) -> None:
        assert not self.samples, "PromptInfo after a Delta or Finished"
        assert info.logprobs.logprobs, "an empty PromptInfo"
        if not self.prompt_logprobs:
            self.prompt_start = info.start
        following = self.prompt_start + len(self.prompt_logprobs)
        assert info.start == following, f"PromptInfo from {info.start} on, {following} comes next"
        self.prompt_logprobs += logprobs_of(info.logprobs)

    @property
    def num_samples(self) -> int:
        """The number of samples in Accepted."""
        return max(1, self.accepted.sampling.num_samples) if self.accepted is not None else 0

    @property
    def tokens(self) -> list[int]:
        return self.samples[0].tokens if 0 in self.samples else []

    @property
    def text(self) -> str:
        return self.samples[0].text if 0 in self.samples else ""

    @property
    def num_deltas(self) -> int:
        return self.samples[0].num_deltas if 0 in self.samples else 0

    @property
    def finished(self) -> pb.Finished | None:
        return self.samples[0].finished if 0 in self.samples else None

    @property
    def reason(self) -> str:
        """The finish reason of sample 0."""
        assert self.finished is not None, "the stream is not finished"
        return self.samples[0].reason
