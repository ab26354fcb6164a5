"""Requests of the system tests, each with the oracle's answer, and the streams of those that were sent.

Owns the translation from request to answer, stop strings included. Knows nothing of processes.
"""

import codecs
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1.constraint_pb2 import Constraint

from scheduler_svc.frontend.constraints.grammar import grammar_of
from tests.rigs import byte_tokenizer
from tests.rigs.oracle import Completion, complete, logprobs
from tests.rigs.sampling import MINUS_INFINITY, SCALARS, Logprob, Settings
from tests.rigs.streams import Caller, Stream, code_of
from tests.rigs.transcript import SampleTranscript, Transcript
from tests.rigs.waiting import until


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    tokens: list[int]
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request by token ids. A sampled request needs a seed, because the oracle needs to know it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = True
    priority: int = 0
    request_id: str = ""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    num_samples: int = 1
    # None requests no logprobs.
    logprobs: int | None = None
    prompt_logprobs_start: int | None = None
    # A Lark grammar, which the checking worker reads as `toy_constraints` says.
    lark: str = ""
    extra: pb.GenerateRequest = field(default_factory=pb.GenerateRequest)

    def request(self) -> pb.GenerateRequest:
        request = pb.GenerateRequest(request_id=self.request_id, priority=self.priority)
        request.token_ids.ids.extend(self.prompt)
        request.sampling.temperature = self.temperature
        request.sampling.seed = self.seed
        self._fill_sampling(request.sampling)
        for name in ("logprobs", "prompt_logprobs_start"):
            if (value := getattr(self, name)) is not None:
                setattr(request.output, name, value)
        request.stop.max_new_tokens = self.max_new_tokens
        if self.min_new_tokens:
            request.stop.min_new_tokens = self.min_new_tokens
        request.stop.stop_token_ids.extend(self.stop_token_ids)
        request.stop.stop_strings.extend(self.stop_strings)
        request.stop.include_stop = self.include_stop
        request.stop.ignore_eos = self.ignore_eos
        if self.lark:
            request.constraint.lark = self.lark
        request.MergeFrom(self.extra)
        return request

    def _fill_sampling(self, sampling: pb.SamplingParams) -> None:
        """Sets only the parameters that differ from their defaults."""
        unset = Ask(prompt=(), max_new_tokens=0)
        for name in SCALARS:
            if getattr(self, name) != getattr(unset, name):
                setattr(sampling, name, getattr(self, name))
        if self.num_samples > 1:
            sampling.num_samples = self.num_samples
        sampling.logit_bias.update(dict(self.logit_bias))
        sampling.allowed_token_ids.ids.extend(self.allowed_token_ids)
        if not self.allowed_token_ids:
            sampling.ClearField("allowed_token_ids")
        sampling.banned_token_ids.extend(self.banned_token_ids)

    def settings(self, sample_idx: int = 0) -> Settings:
        """The sampling settings for the oracle; a ban overrides a bias."""
        banned = dict.fromkeys(self.banned_token_ids, MINUS_INFINITY)
        return Settings(
            **{name: getattr(self, name) for name in SCALARS},
            sample_idx=sample_idx,
            biases=tuple((dict(self.logit_bias) | banned).items()),
            allowed=frozenset(self.allowed_token_ids),
        )

    def completion(self, sample_idx: int = 0) -> Completion:
        """The oracle's tokens, before stop strings apply."""
        return complete(
            self.prompt,
            max_new_tokens=self.max_new_tokens,
            vocab=byte_tokenizer.NUM_DRAWN,
            eos_token_ids=(byte_tokenizer.EOS_ID,),
            settings=self.settings(sample_idx),
            min_new_tokens=self.min_new_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            constraint=grammar_of(Constraint(lark=self.lark)).encode() if self.lark else b"",
        )

    def expected(self, sample_idx: int = 0) -> Expected:
        completion = self.completion(sample_idx)
        tokens = list(completion.tokens)
        # A stop token is in the ids but, by default, not in the text, so a stop string cannot end in it.
        silent = completion.stop_token_id is not None and not self.include_stop
        spoken = tokens[:-1] if silent else tokens
        found = self._find_stop_string(spoken)
        if found is not None:
            num_tokens, text = found
            return Expected(tokens=tokens[:num_tokens], text=text, reason="STOP_STRING")
        text = byte_tokenizer.decode(spoken)
        return Expected(tokens=tokens, text=text, reason=completion.reason.upper())

    def _find_stop_string(self, tokens: list[int]) -> tuple[int, str] | None:
        """Returns (number of tokens up to the end of the first match, the text before it), or None."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for num_tokens, token in enumerate(tokens, start=1):
            seen = len(text)
            text += decoder.decode(byte_tokenizer.token_bytes(token))
            # The match that ends first wins, then the longest.
            ends = [
                (at + len(stop), -len(stop), at)
                for stop in self.stop_strings
                for at in range(len(text))
                if text.startswith(stop, at) and at + len(stop) > seen
            ]
            if ends and num_tokens >= self.min_new_tokens:
                end, _, start = min(ends)
                return num_tokens, text[: end if self.include_stop else start]
        return None

    def check(self, transcript: Transcript) -> None:
        """Asserts that every sample equals the oracle's answer."""
        assert transcript.accepted is not None
        assert transcript.summary is not None
        assert transcript.num_samples == self.num_samples
        num_tokens = sum(self._check_sample(transcript.samples[idx], idx) for idx in range(self.num_samples))
        assert transcript.accepted.prompt_tokens == len(self.prompt)
        usage = transcript.summary.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(self.prompt), num_tokens)
        start = self.prompt_logprobs_start
        expected = [] if start is None else self._logprobs(self.prompt, max(1, start))
        assert transcript.prompt_logprobs == expected
        assert not expected or transcript.prompt_start == max(1, start or 0)

    def _check_sample(self, sample: SampleTranscript, idx: int) -> int:
        expected = self.expected(idx)
        assert sample.tokens == expected.tokens, f"sample {idx}: {_difference(sample.tokens, expected.tokens)}"
        assert sample.text == expected.text, f"the text of {expected.tokens} is {sample.text!r}, not {expected.text!r}"
        assert sample.reason == expected.reason, f"sample {idx} of {self}: {sample.reason}, not {expected.reason}"
        assert sample.finished is not None
        assert sample.finished.output_tokens == len(expected.tokens)
        logprobs = [] if self.logprobs is None else self._logprobs((*self.prompt, *expected.tokens), len(self.prompt))
        assert sample.logprobs == logprobs
        return len(expected.tokens)

    def _logprobs(self, tokens: Sequence[int], start: int) -> list[Logprob]:
        return logprobs(tokens, start=start, vocab_size=byte_tokenizer.VOCAB_SIZE, top_k=self.logprobs or 0)


def _difference(got: Sequence[int], wanted: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return (
        f"{len(got)} tokens of {len(wanted)}; they differ from {at} on: {got[at : at + 4]}, not {wanted[at : at + 4]}"
    )


class Sent(list[Stream]):
    """The streams of asks that were sent together, in their order."""

    def __init__(self, caller: Caller, asks: Iterable[Ask]) -> None:
        super().__init__()
        self.asks: list[Ask] = []
        self._caller = caller
        self.send(asks)

    def send(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self.asks.append(ask)
            self.append(self._caller.generate(ask.request()))

    def wait_tokens(self, count: int) -> None:
        for stream in self:
            stream.wait_tokens(count)

    def wait_more(self, count: int) -> None:
        """Waits until they have `count` more tokens together, or all have ended."""

        def total() -> int:
            return sum(len(stream.transcript.tokens) for stream in self)

        due = total() + count
        until(lambda: total() >= due or all(stream.ended for stream in self), f"{due} tokens")

    def check(self) -> list[Transcript]:
        """Waits for their ends. Asserts that each equals the oracle's answer."""
        transcripts = [stream.result() for stream in self]
        for ask, transcript in zip(self.asks, transcripts, strict=True):
            ask.check(transcript)
        return transcripts

    def check_lost(self) -> None:
        """Waits for their ends. Asserts that each was lost, and that its tokens are the first of the oracle's."""
        for ask, stream in zip(self.asks, self, strict=True):
            assert code_of(stream.failed()) == grpc.StatusCode.UNAVAILABLE
            tokens = stream.transcript.tokens
            assert tokens == ask.expected().tokens[: len(tokens)]

    def worker_changes(self) -> list[int]:
        """How often each went on at another worker. Call it after their ends."""
        return [stream.result().summary.timing.worker_changes for stream in self]


def send(caller: Caller, asks: Iterable[Ask], *, tokens: int = 0) -> Sent:
    """Starts a stream for each ask, and waits until each has `tokens` tokens."""
    sent = Sent(caller, asks)
    if tokens:
        sent.wait_tokens(tokens)
    return sent


def answer(caller: Caller, ask: Ask) -> Transcript:
    """The whole answer of one ask, which equals the oracle's."""
    [transcript] = Sent(caller, [ask]).check()
    return transcript


def random_asks(count: int, *, seed: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> list[Ask]:
    """Draws prompts and outputs of random lengths (bounds included); about half of the requests are sampled."""
    rng = random.Random(seed)
    return [
        Ask(
            # The prompt ends in a letter, so that the output's text is decoded independently of it.
            prompt=(*(rng.randrange(256) for _ in range(rng.randint(*prompts) - 1)), ord("a")),
            max_new_tokens=rng.randint(*outputs),
            temperature=rng.choice([0.0, 0.7]),
            seed=rng.randrange(1 << 64),
        )
        for _ in range(count)
    ]
