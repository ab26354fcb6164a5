"""A worker dies under streams, and the next one takes its pool over: nothing is computed again but the last pages.

The real worker with the bundled model. The undisturbed run of the same prompts is the truth.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_client import Client
from tests.rigs.processes import Child, Rig, SchedulerProcess
from tests.system.real_service import TIMEOUT_SECONDS, prompts

PAGE_SIZE, NUM_STREAMS, NEW_TOKENS = 16, 8, 320
# A step decodes one token per row, or a prompt; so many tokens may be in flight for a row.
IN_FLIGHT = 2
HEADER_BYTES = 2 << 20
_SHAPE = (
    f"--page-size {PAGE_SIZE} --num-pages 240 --max-rows {NUM_STREAMS} --max-length 512 --token-budget 128 --threads 1 "
    "--device cpu --shared-pool on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    tokens: list[int]
    recomputed_tokens: int


@dataclass(slots=True, kw_only=True)
class Service:
    rig: Rig
    holder: Child
    scheduler: SchedulerProcess
    client: Client
    worker: Child

    def generate(
        self,
        texts: Sequence[str],
        *,
        kills: bool = False,
        flags: Sequence[str] = (),
        between: Callable[[], object] = int,
    ) -> list[Text]:
        """All completions at once. If `kills`, the worker is killed when each stream has a page of tokens on average:
        there are pages to keep, and many tokens to come, even if the client reads slowly. Then `between` is called, and
        a worker with these flags starts."""
        tokens: list[list[int]] = [[] for _ in texts]
        enough = threading.Event()

        def read(i: int) -> Text:
            stream = self.client.generate(
                texts[i], temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True, timeout=TIMEOUT_SECONDS
            )
            for delta in stream:
                tokens[i] += delta.token_ids
                if sum(map(len, tokens)) >= len(texts) * PAGE_SIZE:
                    enough.set()
            assert stream.summary is not None
            return Text(tokens=tokens[i], recomputed_tokens=stream.summary.usage.recomputed_tokens)

        with ThreadPoolExecutor(len(texts)) as threads:
            tasks = [threads.submit(read, i) for i in range(len(texts))]
            if kills:
                assert enough.wait(TIMEOUT_SECONDS)
                self.worker.kill()
                between()
                self.worker = self.next_worker(flags)
            return [task.result(TIMEOUT_SECONDS) for task in tasks]

    def next_worker(self, flags: Sequence[str]) -> Child:
        """The one after a killed worker."""
        return worker(self.rig, *flags)


def worker(rig: Rig, *flags: str, program: str = "gpu_worker") -> Child:
    arguments = [program, "--runtime-dir", str(rig.runtime_dir), *_SHAPE.split(), "--exit-with-parent", *flags]
    child = Child("worker", arguments, environment={"OMP_NUM_THREADS": "1"})
    rig.children.append(child)
    return child


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prompts()[:NUM_STREAMS]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Rig() as rig:
        holder = Child("holder", ["gpu_worker.holder", "--runtime-dir", str(rig.runtime_dir), "--exit-with-parent"])
        rig.children.append(holder)
        holder.wait_line("holds pools")
        first = worker(rig)
        first.wait_line("waiting for a scheduler")
        scheduler = rig.scheduler()
        client = Client(scheduler.address)
        client.wait_ready(TIMEOUT_SECONDS)
        yield Service(rig=rig, holder=holder, scheduler=scheduler, client=client, worker=first)
        client.close()


@pytest.fixture(scope="module")
def truth(service: Service, texts: list[str]) -> list[list[int]]:
    """The tokens of an undisturbed run."""
    outputs = service.generate(texts)
    assert [output.recomputed_tokens for output in outputs] == [0] * len(texts)
    service.client.flush_cache()
    return [output.tokens for output in outputs]


def shared_memory(child: Child) -> list[Path]:
    """The memory of the pools that the process holds."""
    return [link for link in Path(f"/proc/{child.pid}/fd").iterdir() if "tandem-kv-pool" in os.readlink(link)]


def test_a_killed_worker_s_pages_are_kept(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    outputs = service.generate(texts, kills=True)
    assert [output.tokens for output in outputs] == truth
    assert all(output.recomputed_tokens <= PAGE_SIZE + IN_FLIGHT for output in outputs), outputs
    assert any(output.recomputed_tokens for output in outputs), "nobody met the death of the worker"
    service.holder.wait_line("takes pool .* over")
    held = service.client.load().held_pools
    assert (held.pools, held.bytes, held.taken_over, held.damaged_pages) == (
        0,
        0,
        1,
        0,
    ) and held.pages_kept >= NUM_STREAMS
    # The new worker's own pool was given back.
    assert len(shared_memory(service.holder)) == 1


def test_a_changed_page_is_computed_again(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    service.client.flush_cache()
    [memory] = shared_memory(service.holder)
    size, seen = memory.stat().st_size, len(service.scheduler.lines)

    def damage() -> None:
        with memory.open("r+b") as file, mmap.mmap(file.fileno(), size) as content:
            # One byte in each KiB of the tensors, nothing of the header.
            content[HEADER_BYTES::1024] = bytes(len(range(HEADER_BYTES, size, 1024)))

    outputs = service.generate(texts, kills=True, between=damage)
    assert [output.tokens for output in outputs] == truth
    assert any(output.recomputed_tokens > PAGE_SIZE + IN_FLIGHT for output in outputs)
    service.scheduler.wait_line("page [0-9]+ of the pool that was taken over has changed since", after=seen)
    assert service.client.load().held_pools.damaged_pages == 1


def test_a_worker_of_another_size_computes_again(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    service.client.flush_cache()
    outputs = service.generate(texts, kills=True, flags=("--num-pages", "230"))
    assert [output.tokens for output in outputs] == truth
    held = service.client.load().held_pools
    assert held.pools == 1 and held.pages > 0 and held.bytes > HEADER_BYTES
    assert any(output.recomputed_tokens > PAGE_SIZE + IN_FLIGHT for output in outputs)


def test_a_dead_holder_stops_nobody(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    service.holder.kill()
    service.client.flush_cache()
    assert [output.tokens for output in service.generate(texts)] == truth
    service.client.flush_cache()
    outputs = service.generate(texts, kills=True, flags=("--shared-pool", "auto"))
    assert [output.tokens for output in outputs] == truth
