"""The client of a benchmarked service: a process that sends all requests and records the time of each token."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem_client import AsyncClient
from tests.measure.machine import cpu_seconds, peak_mb
from tests.measure.workload import Workload


class _Callers:
    """Callers of one client; times count from the creation of this object."""

    def __init__(self, client: AsyncClient, workload: Workload) -> None:
        self._client, self._workload = client, workload
        num_requests = len(workload.prompts)
        self.tokens: list[list[int]] = [[] for _ in range(num_requests)]
        self.times: list[list[float]] = [[] for _ in range(num_requests)]
        self.submitted = [0.0] * num_requests
        self.begun = time.perf_counter()

    async def run(self) -> None:
        numbers = iter(range(len(self._workload.prompts)))
        if self._workload.is_closed:
            await asyncio.gather(*(self._one_after_another(numbers) for _ in range(self._workload.concurrent)))
        else:
            await asyncio.gather(*map(self._complete, numbers))

    async def _one_after_another(self, numbers: Iterator[int]) -> None:
        for is_later, number in enumerate(numbers):
            if is_later:
                self.submitted[number] = time.perf_counter() - self.begun
            await self._complete(number)

    async def _complete(self, number: int) -> None:
        prompt, length = self._workload.prompts[number], self._workload.output_lengths[number]
        async for delta in self._client.generate(prompt, temperature=0.0, max_new_tokens=length, ignore_eos=True):
            self.times[number] += [time.perf_counter() - self.begun] * len(delta.token_ids)
            self.tokens[number] += delta.token_ids


async def measure(address: str, file: str) -> dict[str, Any]:
    """Runs a short round, so that no connection, import or first call is measured, and the workload of the file."""
    workload = Workload.load(Path(file))
    async with AsyncClient(address) as client:
        await client.wait_ready(60)
        short = workload.short_prompts
        await _Callers(client, Workload(prompts=short, output_lengths=[4] * len(short))).run()
        before = await client.load()
        cpu = cpu_seconds()
        callers = _Callers(client, workload)
        await callers.run()
        seconds = time.perf_counter() - callers.begun
        used = cpu_seconds() - cpu
        after = await client.load()
    return {
        "begun": callers.begun,
        "seconds": seconds,
        "tokens": callers.tokens,
        "times": callers.times,
        "submitted": callers.submitted,
        "cpu_seconds": used,
        "peak_mb": peak_mb(),
        "details": {
            "steps": after.steps - before.steps,
            "step_ms": after.step_ms,
            "preemptions": after.preemptions - before.preemptions,
            "workers_given_up": after.incidents.hung_workers,
            "lane_resets": after.lane_resets - before.lane_resets,
        },
        "cached_prompt_tokens": after.cached_prompt_tokens - before.cached_prompt_tokens,
    }
