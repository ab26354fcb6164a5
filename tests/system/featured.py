"""Requests with every feature of sampling at random, through the real client, beside the oracle's answer to each.

Owns the translation of one into the other and the reading of many streams at once. Knows nothing of processes.
"""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from client import Client
from client.request import GenerateOptions
from client.sync_stream import GenerateStream
from client.types import TokenLogprob
from tests.rigs import byte_tokenizer, oracle
from tests.rigs.sampling import MINUS_INFINITY, Settings
from tests.system.asks import Ask

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnAsk(Ask):
    """One sample, by all that shapes its draw."""

    drawn: Settings

    def settings(self) -> Settings:
        return self.drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Featured:
    """`options` are what the client is asked with; `drawn` is what that means for sample 0."""

    prompt: tuple[int, ...]
    options: GenerateOptions
    drawn: Settings

    def start(self, client: Client) -> GenerateStream:
        return client.generate(self.prompt, timeout=PATIENCE_SECONDS, **self.options)

    @property
    def num_samples(self) -> int:
        return self.options.get("num_samples") or 1

    def single(self) -> "Featured":
        """Its first sample alone."""
        return replace(self, options={**self.options, "num_samples": None})

    def check(self, stream: GenerateStream) -> None:
        """The whole answer, against the oracle: every token, text, end and logprob."""
        num_tokens = 0
        assert len(stream.samples) == self.num_samples
        for sample in stream.samples:
            expected = self._ask(sample.idx).expected()
            assert sample.token_ids == expected.tokens, f"sample {sample.idx} of {self}"
            assert sample.text == expected.text, f"sample {sample.idx} of {self}"
            assert sample.finished is not None
            assert sample.finished.reason.upper() == expected.reason
            assert sample.finished.output_tokens == len(expected.tokens)
            assert sample.logprobs == self._logprobs([*self.prompt, *expected.tokens], len(self.prompt))
            num_tokens += len(expected.tokens)
        self._check_prompt(stream)
        assert stream.summary is not None
        usage = stream.summary.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(self.prompt), num_tokens)

    def _ask(self, sample_idx: int) -> DrawnAsk:
        options = self.options
        return DrawnAsk(
            prompt=self.prompt,
            max_new_tokens=options["max_new_tokens"] or 0,
            min_new_tokens=options.get("min_new_tokens") or 0,
            stop_token_ids=tuple(options.get("stop_token_ids") or ()),
            stop_strings=tuple(options.get("stop") or ()),
            ignore_eos=options.get("ignore_eos") or False,
            drawn=replace(self.drawn, sample_idx=sample_idx),
        )

    def _logprobs(self, tokens: Sequence[int], start: int) -> list[TokenLogprob]:
        top_k = self.options.get("logprobs")
        if top_k is None:
            return []
        told = oracle.logprobs(tokens, start=start, vocab_size=byte_tokenizer.VOCAB_SIZE, top_k=top_k)
        return [TokenLogprob(logprob=one.logprob, top=one.top) for one in told]

    def _check_prompt(self, stream: GenerateStream) -> None:
        asked = self.options.get("prompt_logprobs_start")
        if asked is None or len(self.prompt) == 1:
            assert stream.prompt_info is None
            return
        assert stream.prompt_info is not None
        start, top_k = max(1, asked), self.options.get("logprobs") or 0
        told = oracle.logprobs(self.prompt, start=start, vocab_size=byte_tokenizer.VOCAB_SIZE, top_k=top_k)
        assert stream.prompt_info.start == start
        assert stream.prompt_info.logprobs == tuple(TokenLogprob(logprob=o.logprob, top=o.top) for o in told)


def random_featured(
    count: int, *, seed: int, prompts: tuple[int, int], outputs: tuple[int, int], max_samples: int = 4
) -> list[Featured]:
    """Each asks for about half of what there is; lengths are inclusive. Some share the beginning of their prompts."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(256) for _ in range(prompts[1]))
    return [_featured(rng, shared, prompts, outputs, max_samples) for _ in range(count)]


def _featured(
    rng: random.Random, shared: tuple[int, ...], prompts: tuple[int, int], outputs: tuple[int, int], max_samples: int
) -> Featured:
    length = rng.randint(*prompts) - 1
    body = shared[:length] if rng.random() < 0.5 else tuple(rng.randrange(256) for _ in range(length))
    max_new_tokens = rng.randint(*outputs)
    # They end in a letter, so that the output's text stands by itself.
    prompt = (*body, ord("a"))
    options: GenerateOptions = {
        "max_new_tokens": max_new_tokens,
        "num_samples": rng.randint(1, max_samples),
        "ignore_eos": rng.random() < 0.7,
        "min_new_tokens": rng.choice([None, 1, max_new_tokens]),
    }
    if rng.random() < 0.3:
        options["stop_token_ids"] = tuple(rng.sample(range(256), 3))
    if rng.random() < 0.3:
        options["stop"] = rng.sample([" the", "ab", "é", "日", "x", "STOP", "\n\n", "0", "q"], 3)
    if rng.random() < 0.6:
        options["logprobs"] = rng.choice([0, 1, 5, 20])
    if rng.random() < 0.4:
        options["prompt_logprobs_start"] = rng.randrange(len(prompt))
    return Featured(prompt=prompt, options=options, drawn=_draw_settings(rng, options))


def _draw_settings(rng: random.Random, options: GenerateOptions) -> Settings:
    """Chooses what shapes the draw; `options` gets the same."""
    scalars = {
        "temperature": rng.choice([0.0, 0.8]),
        "seed": rng.randrange(1 << 64),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 40]),
        "min_p": rng.choice([0.0, 0.05]),
        "presence_penalty": rng.choice([0.0, 0.0, -1.5, 0.7]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.3]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
    }
    options.update(scalars)
    biases: dict[int, float] = {}
    if rng.random() < 0.3:
        biases = {token: rng.choice([-100.0, -0.1, 2.5]) for token in rng.sample(range(byte_tokenizer.VOCAB_SIZE), 5)}
        options["logit_bias"] = dict(biases)
    banned = rng.sample(range(256), 4) if rng.random() < 0.3 else []
    if banned:
        options["banned_token_ids"] = banned
        biases.update(dict.fromkeys(banned, MINUS_INFINITY))
    allowed: list[int] = []
    if rng.random() < 0.3:
        # Enough that bans and stop tokens leave some.
        allowed = rng.sample(range(byte_tokenizer.NUM_DRAWN), 16)
        options["allowed_token_ids"] = allowed
    return Settings(**scalars, biases=tuple(sorted(biases.items())), allowed=frozenset(allowed))


class Reading:
    """Streams that were started together, each read by a thread."""

    def __init__(self, client: Client, asks: Sequence[Featured]) -> None:
        self._asks = asks
        self.streams = [ask.start(client) for ask in asks]
        self._num_tokens = 0
        self._num_ended = 0
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=len(asks))
        self._tasks = [self._pool.submit(self._read, stream) for stream in self.streams]

    def _read(self, stream: GenerateStream) -> None:
        try:
            for delta in stream:
                with self._changed:
                    self._num_tokens += len(delta.token_ids)
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._num_ended += 1
                self._changed.notify_all()

    @property
    def num_running(self) -> int:
        return len(self.streams) - self._num_ended

    def wait_more(self, num_tokens: int) -> None:
        """Until so many more tokens have come, or all have ended."""
        with self._changed:
            due = self._num_tokens + num_tokens
            self._changed.wait_for(lambda: self._num_tokens >= due or not self.num_running, PATIENCE_SECONDS)
            assert self._num_tokens >= due or not self.num_running, f"{self._num_tokens} tokens of {due}"

    def check(self) -> None:
        """All of them, whole, against the oracle."""
        for task in self._tasks:
            task.result(PATIENCE_SECONDS)
        self._pool.shutdown()
        for ask, stream in zip(self._asks, self.streams, strict=True):
            ask.check(stream)
