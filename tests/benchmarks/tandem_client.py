"""The client of a benchmarked service: `python -m tests.benchmarks.tandem_client --address A --workload FILE`.

Owns one process that sends all requests at once and records the time of each token; prints one JSON object.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from tandem_client import AsyncClient
from tests.benchmarks.machine import cpu_seconds, peak_mb
from tests.benchmarks.workload import Workload


async def _complete(client: AsyncClient, prompt: list[int], length: int, begun: float) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    times: list[float] = []
    async for delta in client.generate(prompt, temperature=0.0, max_new_tokens=length, ignore_eos=True):
        times += [time.perf_counter() - begun] * len(delta.token_ids)
        tokens += delta.token_ids
    return tokens, times


async def measure(address: str, workload: Workload) -> dict[str, Any]:
    """Runs a short round, so that no connection, import or first call is measured."""
    async with AsyncClient(address) as client:
        await client.wait_ready(60)
        short = zip(workload.prompts[:4], [4] * 4, strict=True)
        await asyncio.gather(*(_complete(client, prompt, length, 0.0) for prompt, length in short))
        before = await client.load()
        cpu, begun = cpu_seconds(), time.perf_counter()
        pairs = zip(workload.prompts, workload.output_lengths, strict=True)
        outputs = await asyncio.gather(*(_complete(client, prompt, length, begun) for prompt, length in pairs))
        seconds = time.perf_counter() - begun
        used = cpu_seconds() - cpu
        after = await client.load()
    return {
        "seconds": seconds,
        "tokens": [tokens for tokens, _ in outputs],
        "times": [times for _, times in outputs],
        "cpu_seconds": used,
        "peak_mb": peak_mb(),
        "steps": after.steps - before.steps,
        "step_ms": after.step_ms,
        "preemptions": after.preemptions - before.preemptions,
        "lane_resets": after.lane_resets - before.lane_resets,
    }


def main() -> None:
    """Prints one line of JSON to stdout."""
    parser = argparse.ArgumentParser(prog="tandem_client", allow_abbrev=False)
    parser.add_argument("--address", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.address, Workload.load(args.workload)))), flush=True)


if __name__ == "__main__":
    main()
