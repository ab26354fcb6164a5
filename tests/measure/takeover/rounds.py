"""One service with a standby worker, and the kill of its serving worker under streams.

Owns the process of `tandem serve`, the streams and the clock. Times are in seconds since the kill.
"""

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem_client import AsyncClient, TlsSettings
from tandem_client.errors import TandemError
from tandem_client.types import DrainState, Load
from tests.measure.served import served
from tests.rigs.door import Door

NUM_STREAMS = 32
KNOWN_TOKENS = 200
PROMPT_TOKENS = 150
# The streams still have as many tokens to compute when they reach KNOWN_TOKENS, at least.
_TOKENS_AFTER = 100
# Tokens that the worker has sent arrive while it is stopped.
QUIET_SECONDS = 0.1
_MOST_SECONDS = 120.0
_LOOK_SECONDS = 0.2


class Stream:
    """One request, its tokens so far, and the time of its first token after `killed_at`."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.text = ""
        self.recomputed_tokens = 0
        self.killed_at: float | None = None
        self.first_after: float | None = None
        # The longest time between two messages, the second of which came after `killed_at`.
        self.pause = 0.0
        self.last_at = 0.0

    async def run(self, client: AsyncClient, prompt: list[int], *, resume: bool = False) -> None:
        """Runs the request to its end."""
        num_tokens = KNOWN_TOKENS - PROMPT_TOKENS + _TOKENS_AFTER
        stream = client.generate(prompt, max_new_tokens=num_tokens, ignore_eos=True, temperature=0.0, resume=resume)
        async for delta in stream:
            now = time.monotonic()
            if self.killed_at is not None:
                if self.first_after is None:
                    self.first_after = now - self.killed_at
                self.pause = max(self.pause, now - self.last_at)
            self.last_at = now
            self.num_tokens += len(delta.token_ids)
            self.text += delta.text
        assert stream.summary is not None and self.num_tokens == num_tokens, "a stream has lost tokens"
        self.recomputed_tokens = stream.summary.usage.recomputed_tokens


def prompts() -> list[list[int]]:
    """The prompts of the streams, each with another beginning, so no pages are shared."""
    draw = random.Random(7)
    return [[draw.randrange(100, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]


@asynccontextmanager
async def service(standbys: int, worker_flags: str, *, has_door: bool = False) -> AsyncIterator[AsyncClient]:
    """Runs `tandem serve` with standby workers, ready, until the end of the block; with a door over TLS with tokens."""
    with tempfile.TemporaryDirectory(prefix="tandem-takeover-") as name:
        folder = Path(name)
        door = Door(folder) if has_door else None
        flags = ["--standby", str(standbys), "--worker", worker_flags, *(door.service_flags if door else ())]
        with served(folder, *flags) as address:
            tls = None if door is None else TlsSettings(ca=door.authority)
            async with AsyncClient(address, token=door and door.token, tls=tls) as client:
                await _until(client, lambda load: load.workers == 1 and load.standby_workers == standbys)
                yield client


async def disturbed(
    client: AsyncClient,
    texts: list[list[int]],
    happens: Callable[[], Awaitable[object]],
    *,
    stop: Callable[[], object] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Lets something happen when each stream has KNOWN_TOKENS, and `stop` a moment before. Returns when all have ended.

    First and last: the seconds until a token of any stream, and until each stream had one. The pause is the longest
    time without a token of a stream; positions that were computed again are those of all streams together.
    """
    streams = [Stream() for _ in range(NUM_STREAMS)]
    running = [
        asyncio.create_task(stream.run(client, text, resume=resume))
        for stream, text in zip(streams, texts, strict=True)
    ]
    while min(stream.num_tokens for stream in streams) < KNOWN_TOKENS - PROMPT_TOKENS:
        await asyncio.sleep(0.002)
        for task in running:
            if task.done():
                task.result()
    if stop is not None:
        stop()
        await asyncio.sleep(QUIET_SECONDS)
    begun = time.monotonic()
    for stream in streams:
        stream.killed_at = begun
    await happens()
    await asyncio.gather(*running)
    after = [stream.first_after for stream in streams if stream.first_after is not None]
    assert len(after) == NUM_STREAMS, "a stream ended before it happened"
    return {
        "begun": begun,
        "first_seconds": min(after),
        "last_seconds": max(after),
        "longest_pause_seconds": max(stream.pause for stream in streams),
        "recomputed_tokens": float(sum(stream.recomputed_tokens for stream in streams)),
        "texts": [stream.text for stream in streams],
    }


async def takeover(client: AsyncClient, standbys: int, *, is_planned: bool = False) -> dict[str, Any]:
    """Kills the serving worker under the streams; returns when all have ended and the standby workers are back.

    If `is_planned`, the worker is drained instead, and the times begin with the call.
    """
    [serving] = [worker.pid for worker in (await client.load()).per_worker if not worker.is_standby]

    async def drain() -> None:
        async for progress in client.drain(str(serving)):
            state = progress.state
        assert state == DrainState.DONE

    async def kill() -> None:
        os.kill(serving, signal.SIGKILL)

    if is_planned:
        found = await disturbed(client, prompts(), drain)
    else:
        found = await disturbed(client, prompts(), kill, stop=lambda: os.kill(serving, signal.SIGSTOP))
    await _until(client, lambda load: load.workers == 1 and load.standby_workers == standbys)
    return found | {"standby_again_seconds": time.monotonic() - found["begun"]}


async def _until(client: AsyncClient, is_so: Callable[[Load], bool]) -> None:
    async with asyncio.timeout(_MOST_SECONDS):
        while True:
            try:
                if is_so(await client.load()):
                    return
            except TandemError:
                pass  # The service does not listen yet.
            await asyncio.sleep(_LOOK_SECONDS)
