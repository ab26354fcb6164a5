"""Client processes that send requests to a service at one moment.

Owns one process each, and the fleet that the parent starts. A process connects, says `ready`, waits for the file that
starts all of them, and sends its share of the requests at once. Times are those of
time.perf_counter, which on Linux all processes share.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tandem_client import AsyncClient
from tests.measure import call
from tests.measure.gpu_day.workloads import Requests
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Child

_READY_SECONDS = 120.0
_POLL_SECONDS = 0.001
# Tokens of the short request that opens connections.
_SHORT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The answers to all requests, in their order, and the times of their tokens on time.perf_counter's clock."""

    begun: float
    tokens: list[list[int]]
    times: list[list[float]]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(times[-1] for times in self.times) - self.begun


class Fleet:
    """Client processes that are connected and wait for `start`."""

    def __init__(self, address: str, requests: Requests, folder: Path, *, num_processes: int) -> None:
        self._folder, self._num_requests = folder, len(requests.prompts)
        requests.save(folder / "requests.json")
        asked = {"address": address, "folder": str(folder), "of": num_processes}
        self._children = [
            Child(f"client {number}", call.words("gpu_day.clients.measure", number=number, **asked))
            for number in range(num_processes)
        ]
        for child in self._children:
            child.wait_line("^ready$", _READY_SECONDS)

    def start(self) -> None:
        self._begun = time.perf_counter()
        (self._folder / "go").touch()

    def result(self, seconds: float) -> Completions:
        """Waits for all answers, at most `seconds`."""
        tokens: list[list[int]] = [[] for _ in range(self._num_requests)]
        times: list[list[float]] = [[] for _ in range(self._num_requests)]
        cpu = 0.0
        for child in self._children:
            answer = call.answer(child, seconds)
            cpu += answer["cpu_seconds"]
            for index, of_request, its_times in answer["completions"]:
                tokens[index], times[index] = of_request, its_times
        return Completions(begun=self._begun, tokens=tokens, times=times, cpu_seconds=cpu)

    def end(self) -> None:
        for child in self._children:
            child.terminate()


async def _complete(client: AsyncClient, requests: Requests, i: int) -> tuple[int, list[int], list[float]]:
    tokens: list[int] = []
    times: list[float] = []
    stream = client.generate(
        requests.prompts[i],
        temperature=requests.temperature,
        top_p=1.0,
        top_k=0,
        seed=i,
        max_new_tokens=requests.output_lengths[i],
        ignore_eos=True,
    )
    async for delta in stream:
        assert delta.token_offset == len(tokens) or not delta.token_ids, f"request {i} misses or repeats a token"
        times += [time.perf_counter()] * len(delta.token_ids)
        tokens += delta.token_ids
    return i, tokens, times


async def measure(address: str, folder: str, number: int, of: int) -> dict[str, object]:
    """Sends share `number` of `of` of the requests. Returns their completions, and the CPU time that they took."""
    requests, go = Requests.load(Path(folder) / "requests.json"), Path(folder) / "go"
    mine = range(number, len(requests.prompts), of)
    async with AsyncClient(address) as client:
        await client.wait_ready(_READY_SECONDS)
        short = client.generate(requests.prompts[mine[0]][:_SHORT], max_new_tokens=_SHORT, ignore_eos=True)
        assert [delta async for delta in short]
        print("ready", flush=True)
        while not go.exists():
            await asyncio.sleep(_POLL_SECONDS)
        before = cpu_seconds()
        completions = await asyncio.gather(*(_complete(client, requests, i) for i in mine))
        return {"completions": completions, "cpu_seconds": cpu_seconds() - before}
