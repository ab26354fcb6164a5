"""Random requests with every sampling feature, read together through the real client.

Owns the random choice and the client's keywords for an Ask. Knows nothing of processes.
"""

import random
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tandem_client import Client
from tandem_client.sync_client import GenerateStream
from tandem_client.wire.request import GenerateOptions
from tests.rigs import byte_tokenizer
from tests.rigs.transcript import Transcript
from tests.rigs.waiting import LINGER_SECONDS, TIMEOUT_SECONDS
from tests.system.asks import Ask

MAX_STREAMS = 128


def random_featured(count: int, *, seed: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> list[Ask]:
    """Each request uses about half of the features; lengths are inclusive. Some prompts share their beginning."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(256) for _ in range(prompts[1]))
    return [_featured(rng, shared, prompts, outputs) for _ in range(count)]


def _featured(rng: random.Random, shared: tuple[int, ...], prompts: tuple[int, int], outputs: tuple[int, int]) -> Ask:
    length = rng.randint(*prompts) - 1
    max_new_tokens = rng.randint(*outputs)
    body = shared[:length] if rng.random() < 0.5 else tuple(rng.randrange(256) for _ in range(length))

    def sometimes(probability: float, value: Any, otherwise: Any = ()) -> Any:
        return value if rng.random() < probability else otherwise

    biased = rng.sample(range(byte_tokenizer.VOCAB_SIZE), 5)
    return Ask(
        # The prompt ends in a letter, so that the output's text is decoded independently of it.
        prompt=(*body, ord("a")),
        max_new_tokens=max_new_tokens,
        min_new_tokens=rng.choice([0, 1, max_new_tokens]),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=sometimes(0.3, tuple(rng.sample(range(256), 3))),
        stop_strings=sometimes(0.3, tuple(rng.sample([" the", "ab", "é", "日", "x", "STOP", "\n\n", "0", "q"], 3))),
        num_samples=rng.randint(1, 4),
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randrange(1 << 64),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 40]),
        min_p=rng.choice([0.0, 0.05]),
        typical_p=rng.choice([1.0, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, -1.5, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=sometimes(0.3, tuple((token, rng.choice([-100.0, -0.1, 2.5])) for token in biased)),
        # Leaves enough tokens after bans and stop tokens.
        allowed_token_ids=sometimes(0.3, tuple(rng.sample(range(byte_tokenizer.NUM_DRAWN), 16))),
        banned_token_ids=sometimes(0.3, tuple(rng.sample(range(256), 4))),
        logprobs=sometimes(0.6, rng.choice([0, 1, 5, 20]), None),
        prompt_logprobs_start=sometimes(0.4, rng.randrange(length + 1), None),
    )


def keywords(ask: Ask) -> GenerateOptions:
    """The client's keywords for all of the Ask except the prompt, including fields at their defaults."""
    options: dict[str, Any] = {
        name: getattr(ask, name) for name in Ask.__slots__ if name not in ("prompt", "stop_strings", "extra")
    }
    options["stop"] = ask.stop_strings
    options["logit_bias"] = dict(ask.logit_bias)
    # An empty list of allowed tokens differs from no list.
    options["allowed_token_ids"] = ask.allowed_token_ids or None
    options["lark"] = ask.lark or None
    return GenerateOptions(**options)


class Reading:
    """Streams that run together, each read by a thread. With `resume` they go on by themselves when they are lost."""

    def __init__(
        self, client: Client, asks: Iterable[Ask], *, resume: bool = False, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self._client = client
        self._timeout = timeout
        self._resume = resume
        self._asks: list[Ask] = []
        self.streams: list[GenerateStream] = []
        self._accepted: set[GenerateStream] = set()
        self._ended: set[GenerateStream] = set()
        self._num_tokens = 0
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=MAX_STREAMS)
        self._tasks: list[Future[Transcript]] = []
        self.start(asks)

    def start(self, asks: Iterable[Ask]) -> None:
        asks = list(asks)
        streams = [
            self._client.generate(ask.prompt, timeout=self._timeout, resume=self._resume, **self._keywords(ask))
            for ask in asks
        ]
        self._asks += asks
        self.streams += streams
        assert len(self.running) <= MAX_STREAMS
        self._tasks += [self._pool.submit(self._read, stream) for stream in streams]

    def _keywords(self, ask: Ask) -> GenerateOptions:
        options = keywords(ask)
        if self._resume:
            options["linger_seconds"] = LINGER_SECONDS
        return options

    def _read(self, stream: GenerateStream) -> Transcript:
        transcript = Transcript()
        try:
            for message in stream.messages():
                transcript.take(message)
                with self._changed:
                    self._accepted.add(stream)
                    self._num_tokens += len(message.delta.token_ids)
                    self._changed.notify_all()
            return transcript
        finally:
            with self._changed:
                self._ended.add(stream)
                self._changed.notify_all()

    @property
    def running(self) -> list[GenerateStream]:
        """The live streams, in the order of their start."""
        return [stream for stream in self.streams if stream not in self._ended]

    def wait_accepted(self) -> None:
        """Waits until the service has accepted every stream."""
        with self._changed:
            answered = self._changed.wait_for(
                lambda: all(stream in self._accepted or stream in self._ended for stream in self.streams), self._timeout
            )
            assert answered, f"{len(self.streams) - len(self._accepted | self._ended)} streams are not accepted"

    def wait_more(self, num_tokens: int) -> None:
        """Waits until the streams have `num_tokens` more tokens together, or all have ended."""
        with self._changed:
            due = self._num_tokens + num_tokens
            self._changed.wait_for(lambda: self._num_tokens >= due or not self.running, self._timeout)
            assert self._num_tokens >= due or not self.running, f"{self._num_tokens} tokens of {due}"

    def check(self) -> None:
        """Asserts that every stream equals the oracle, and that the client's collected result equals the stream."""
        transcripts = [task.result(self._timeout) for task in self._tasks]
        self._pool.shutdown()
        for ask, stream, transcript in zip(self._asks, self.streams, transcripts, strict=True):
            ask.check(transcript)
            for sample in stream.samples:
                expected = transcript.samples[sample.idx]
                assert (sample.token_ids, sample.text) == (expected.tokens, expected.text)
                assert sample.finished is not None and expected.finished is not None
                assert sample.finished.reason.upper() == expected.reason
                assert [(one.logprob, one.top) for one in sample.logprobs] == [
                    (one.logprob, one.top) for one in expected.logprobs
                ]
            info = stream.prompt_info
            gathered = [] if info is None else [(one.logprob, one.top) for one in info.logprobs]
            assert gathered == [(one.logprob, one.top) for one in transcript.prompt_logprobs]
