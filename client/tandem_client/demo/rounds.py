"""One round of the demo: its prompts, which are all sent at the same time, and each stream read to its end.

Owns the measurements of a round and the comparison of two. The bundled model was trained on Python's documentation, so
the prompts begin like it. Knows nothing of processes or terminals.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem_client.async_client import AsyncClient
from tandem_client.rates import rate_of
from tandem_client.types import Delta, Summary
from tandem_client.wire.request import GenerateOptions

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and its sampling options."""

    prompt: str
    options: GenerateOptions


_GREEDY: GenerateOptions = {"temperature": 0.0}
# The noise depends on seed and position only, so this completion too must be the same each time.
_SEEDED: GenerateOptions = {"temperature": 0.8, "top_p": 0.95, "seed": 2026}


def questions(max_new_tokens: int) -> list[Question]:
    """Returns the demo's requests, each for `max_new_tokens` tokens."""
    prompts = [
        ("Return the number of", _GREEDY),
        ("Raise ValueError if the", _GREEDY),
        ("This module provides a simple interface to", _GREEDY),
        ("If the file does not exist,", _GREEDY),
        ("Convert a string to a", _GREEDY),
        ("Read up to size bytes from the", _GREEDY),
        ("The default value is None, which means", _GREEDY),
        ("This class is used to", _SEEDED),
    ]
    # With a fixed length, every run does the same work.
    fixed: GenerateOptions = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    return [Question(prompt=prompt, options={**options, **fixed}) for prompt, options in prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    prompt: str
    token_ids: tuple[int, ...]
    text: str
    ended_by: str
    # The time from the call to the first delta, from there to the end, and the tokens of that delta.
    first_token_seconds: float
    decode_seconds: float
    first_tokens: int
    summary: Summary

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first delta; None if all came at once."""
        return rate_of(len(self.token_ids) - self.first_tokens, self.decode_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All completions, and the service's load meanwhile."""

    completions: tuple[Completion, ...]
    seconds: float
    steps: int
    # The largest number of pages in use at one time.
    pages_used: int
    pages_total: int
    lane_resets: int

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(slots=True)
class Arrivals:
    """The number of tokens so far, which a task can wait on."""

    num_tokens: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, num_tokens: int) -> None:
        async with self._changed:
            self.num_tokens += num_tokens
            self._changed.notify_all()

    async def wait_for(self, num_tokens: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_tokens >= num_tokens)


OnDelta = Callable[[int, Delta], None]
OnDone = Callable[[int, Completion], None]


async def run_round(
    client: AsyncClient, asked: Sequence[Question], *, arrivals: Arrivals, on_delta: OnDelta, on_done: OnDone
) -> Round:
    """Sends all prompts at the same time and reads every stream. On an error, cancels the other streams and raises."""
    before = await client.load()
    pages_used = [0]
    watching = asyncio.create_task(_watch(client, pages_used))
    started = time.monotonic()
    asking = [
        asyncio.create_task(_ask(client, index, question, arrivals, on_delta, on_done))
        for index, question in enumerate(asked)
    ]
    try:
        completions = await asyncio.gather(*asking)
    finally:
        for task in (*asking, watching):
            task.cancel()
    after = await client.load()
    return Round(
        completions=tuple(completions),
        seconds=time.monotonic() - started,
        steps=after.steps - before.steps,
        pages_used=max(pages_used),
        pages_total=after.pages_total,
        lane_resets=after.lane_resets - before.lane_resets,
    )


def differing(undisturbed: Round, disturbed: Round) -> list[int]:
    """Returns the indices of the prompts with two different completions."""
    ones, others = (
        [(completion.token_ids, completion.text, completion.ended_by) for completion in of.completions]
        for of in (undisturbed, disturbed)
    )
    return [index for index, (one, other) in enumerate(zip(ones, others, strict=True)) if one != other]


async def _ask(
    client: AsyncClient, index: int, question: Question, arrivals: Arrivals, on_delta: OnDelta, on_done: OnDone
) -> Completion:
    started = time.monotonic()
    first, first_tokens = None, 0
    async with client.generate(question.prompt, **question.options) as stream:
        async for delta in stream:
            if first is None:
                first, first_tokens = time.monotonic(), len(delta.token_ids)
            on_delta(index, delta)
            await arrivals.add(len(delta.token_ids))
    ended = time.monotonic()
    assert stream.finished is not None
    assert stream.summary is not None
    [sample] = stream.samples
    completion = Completion(
        prompt=question.prompt,
        token_ids=tuple(sample.token_ids),
        text=sample.text,
        ended_by=stream.finished.reason,
        first_token_seconds=(first or ended) - started,
        decode_seconds=ended - (first or ended),
        first_tokens=first_tokens,
        summary=stream.summary,
    )
    on_done(index, completion)
    return completion


async def _watch(client: AsyncClient, pages_used: list[int]) -> None:
    """Polls the load, because only GetLoad reports the number of pages in use."""
    while True:
        pages_used.append((await client.load()).pages_used)
        await asyncio.sleep(_LOOK_SECONDS)
