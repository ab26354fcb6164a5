"""One round of the demo: its prompts, which are all sent at the same time, and each stream read to its end.

Owns the measurements of a round and the comparison of two. The bundled model was trained on Python's documentation, so
the prompts begin like it. Knows nothing of processes or terminals.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_client.async_client import AsyncClient
from tandem_client.rates import rate_of
from tandem_client.wire.request import GenerateOptions

_LOOK_SECONDS = 0.02
_GREEDY: GenerateOptions = {"temperature": 0.0}
# The noise depends on seed and position only, so this completion too must be the same each time.
_SEEDED: GenerateOptions = {"temperature": 0.8, "top_p": 0.95, "seed": 2026}
PROMPTS = (
    ("Return the number of", _GREEDY),
    ("Raise ValueError if the", _GREEDY),
    ("This module provides a simple interface to", _GREEDY),
    ("If the file does not exist,", _GREEDY),
    ("Convert a string to a", _GREEDY),
    ("Read up to size bytes from the", _GREEDY),
    ("The default value is None, which means", _GREEDY),
    ("This class is used to", _SEEDED),
)


@dataclass(slots=True, kw_only=True)
class Completion:
    """A prompt with its sampling options, and what has come of its stream."""

    prompt: str
    options: GenerateOptions
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    # Empty until the stream has ended; then the next fields are set, too.
    ended_by: str = ""
    # The time from the call to the first delta, from there to the end, and the tokens of that delta.
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_tokens: int = 0
    worker_changes: int = 0
    recomputed_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first delta; None if all came at once."""
        return rate_of(len(self.token_ids) - self.first_tokens, self.decode_seconds)


def asked(max_new_tokens: int) -> list[Completion]:
    """Returns the demo's requests, each for `max_new_tokens` tokens."""
    # With a fixed length, every run does the same work.
    fixed: GenerateOptions = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    return [Completion(prompt=prompt, options={**options, **fixed}) for prompt, options in PROMPTS]


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """All completions, and the service's load meanwhile."""

    completions: list[Completion]
    seconds: float = 0.0
    steps: int = 0
    # The largest number of pages in use at one time.
    pages_used: int = 0
    pages_total: int = 0
    lane_resets: int = 0
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @property
    def num_tokens(self) -> int:
        """The tokens so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    async def wait_for(self, num_tokens: int) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.num_tokens >= num_tokens)

    async def play(self, client: AsyncClient, on_done: Callable[[int], None]) -> None:
        """Sends all prompts at the same time and reads every stream. On an error, cancels the others and raises.

        `on_done` is called with the index of a completion that has ended.
        """
        before = await client.load()
        watching = asyncio.create_task(self._watch(client))
        started = time.monotonic()
        asking = [
            asyncio.create_task(self._ask(client, index, completion, on_done))
            for index, completion in enumerate(self.completions)
        ]
        try:
            await asyncio.gather(*asking)
        finally:
            for task in (*asking, watching):
                task.cancel()
        after = await client.load()
        self.seconds, self.pages_total = time.monotonic() - started, after.pages_total
        self.steps, self.lane_resets = after.steps - before.steps, after.lane_resets - before.lane_resets

    async def _ask(self, client: AsyncClient, index: int, one: Completion, on_done: Callable[[int], None]) -> None:
        started, first = time.monotonic(), None
        async with client.generate(one.prompt, **one.options) as stream:
            async for delta in stream:
                if first is None:
                    first, one.first_tokens = time.monotonic(), len(delta.token_ids)
                one.text += delta.text
                async with self._arrived:
                    one.token_ids += delta.token_ids
                    self._arrived.notify_all()
        ended = time.monotonic()
        first = first or ended
        one.first_token_seconds, one.decode_seconds = first - started, ended - first
        assert stream.finished is not None and stream.summary is not None
        one.worker_changes = stream.summary.timing.worker_changes
        one.recomputed_tokens = stream.summary.usage.recomputed_tokens
        one.ended_by = stream.finished.reason
        on_done(index)

    async def _watch(self, client: AsyncClient) -> None:
        """Polls the load, because only GetLoad reports the number of pages in use."""
        while True:
            self.pages_used = max(self.pages_used, (await client.load()).pages_used)
            await asyncio.sleep(_LOOK_SECONDS)


def differing(undisturbed: Round, disturbed: Round) -> list[int]:
    """Returns the indices of the prompts with two different completions."""
    ones, others = (
        [(completion.token_ids, completion.text, completion.ended_by) for completion in of.completions]
        for of in (undisturbed, disturbed)
    )
    return [index for index, (one, other) in enumerate(zip(ones, others, strict=True)) if one != other]
