"""Measures what a request that makes its steps fail costs its batchmates: `python -m tests.measure.failing_steps`.

On the content-checking worker each step that computes a certain token fails. The service finds such a request by
bisection and refuses it when it is sent again. Owns the order of requests, the gaps between tokens and the report.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tandem_client import AsyncClient
from tandem_client.errors import Internal, Quarantined
from tests.measure.harness import Bar, Measurement, rows, spread, words
from tests.rigs.processes import Rig

# Milliseconds by which the longest gap between two tokens of any batchmate may exceed the longest one undisturbed.
BAR_MS = 100.0
CULPRIT = 281
_NUM_TOKENS = 6000
_SHAPE = ("--max-rows", "64", "--max-length", "8192", "--token-budget", "512", "--page-size", "16")
# Quiet time before each request, from which the undisturbed gaps are taken.
_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class Batchmate:
    """One stream that has nothing wrong with it: the times at which its tokens came."""

    times: list[float] = field(default_factory=list[float])

    async def read(self, client: AsyncClient, prompt: Sequence[int]) -> None:
        stream = client.generate(prompt, max_new_tokens=_NUM_TOKENS, ignore_eos=True, temperature=0.0)
        async for _ in stream:
            self.times.append(time.perf_counter())

    def gaps(self, begin: float, end: float) -> Iterator[float]:
        """The gaps between tokens that touch this span, in seconds."""
        return (after - before for before, after in pairwise(self.times) if after >= begin and before <= end)


def _longest_ms(batchmates: list[Batchmate], begin: float, end: float) -> float:
    return 1e3 * max(gap for batchmate in batchmates for gap in batchmate.gaps(begin, end))


async def _cost(client: AsyncClient, batchmates: list[Batchmate], number: int) -> dict[str, float]:
    """Sends one culprit twice, the second time to be refused. Returns its cost: the longest gaps of any batchmate."""

    async def ends(error: type[Exception]) -> tuple[float, float]:
        begin = time.perf_counter()
        try:
            async for _ in client.generate([1, 2, CULPRIT, number], max_new_tokens=20):
                pass
        except error:
            return begin, time.perf_counter()
        raise AssertionError(f"the request did not end with {error.__name__}")

    quiet = time.perf_counter()
    await asyncio.sleep(_PAUSE_SECONDS)
    resets = (await client.load()).lane_resets
    begin, end = await ends(Internal)
    # The last requests of the bisection have their next tokens by then.
    await asyncio.sleep(_PAUSE_SECONDS / 2)
    failed_steps = (await client.load()).lane_resets - resets
    again = await ends(Quarantined)
    await asyncio.sleep(_PAUSE_SECONDS / 4)
    undisturbed_ms, disturbed_ms = (_longest_ms(batchmates, *span) for span in ((quiet, begin - 0.1), (begin, end)))
    again_ms = _longest_ms(batchmates, *again)
    return {
        "failed_steps": failed_steps,
        "undisturbed_ms": undisturbed_ms,
        "disturbed_ms": disturbed_ms,
        "beyond_ms": disturbed_ms - undisturbed_ms,
        "refused_beyond_ms": again_ms - undisturbed_ms,
        "seconds": end - begin,
    }


async def measured(address: str, num_batchmates: int, num_culprits: int) -> list[dict[str, float]]:
    """The costs of culprits, one after the other. Raises if a batchmate ends."""
    async with AsyncClient(address) as client:
        await client.wait_ready(60.0)
        batchmates = [Batchmate() for _ in range(num_batchmates)]
        tasks = [
            asyncio.create_task(batchmate.read(client, [100 + idx % 100, *range(1, 2 + idx)]))
            for idx, batchmate in enumerate(batchmates)
        ]
        while not all(len(batchmate.times) > 20 for batchmate in batchmates):
            await asyncio.sleep(0.05)
        costs: list[dict[str, float]] = []
        for number in range(num_culprits):
            costs.append(await _cost(client, batchmates, number))
            print(f"request {number + 1}: {words(costs[-1])}", file=sys.stderr)
        ended = [task for task in tasks if task.done()]
        assert not ended, f"{len(ended)} batchmates ended: {ended[0]}"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return costs


def summary(costs: list[dict[str, float]]) -> dict[str, Any]:
    """The spread of each figure, in milliseconds."""
    gaps = ("undisturbed_ms", "disturbed_ms", "beyond_ms", "refused_beyond_ms")
    return {
        "requests": len(costs),
        "failed_steps": sum(one["failed_steps"] for one in costs),
        **{name: spread([one[name] for one in costs]) for name in gaps},
    }


def main() -> int:
    measurement = Measurement("failing_steps")
    measurement.flag("--requests", type=int, default=10, help="requests that make their steps fail")
    measurement.flag("--batchmates", type=int, default=31)
    measurement.flag("--step-ms", type=float, default=10.0, help="least time of a step")
    args = measurement.begin()
    num_pages = 1 + (args.batchmates + 1) * (_NUM_TOKENS + 200) // 16
    flags = (*_SHAPE, "--num-pages", str(num_pages), "--step-ms", str(args.step_ms), "--fail-token", str(CULPRIT))
    with Rig() as rig:
        scheduler = rig.scheduler()
        rig.worker(*flags, late=False)
        costs = asyncio.run(measured(scheduler.address, args.batchmates, args.requests))
    found = summary(costs)
    measurement.note("the longest gap between two tokens of any stream:")
    measurement.line({**found, "batchmates": args.batchmates, "rounds": costs}, text="\n".join(rows(found)))
    beyond = found["beyond_ms"]["median"]
    measurement.bar(Bar(name="ms beyond the undisturbed gap", value=beyond, limit=BAR_MS))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
