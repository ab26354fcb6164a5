"""Pages outlive a worker, because the next one takes its pool over, and a scheduler: only the last are computed again.

The real worker with the bundled model, its pool in shared memory, and a journal. The undisturbed run of the same
prompts is the truth. The tests share one service and run in this order.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_client import Client
from tests.rigs.processes import Child, Rig, SchedulerProcess
from tests.system.real_service import TIMEOUT_SECONDS, Output, Reading, prompts
from tests.system.test_scheduler_loss import journal_flags, restarted

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")

PAGE_SIZE, NUM_STREAMS, NEW_TOKENS = 16, 8, 200
# A step decodes one token per row, or a prompt; a row may have IN_FLIGHT tokens on their way. The label of a page goes
# with a later plan than the one that filled it.
IN_FLIGHT, UNLABELLED = 2, 4
HEADER_BYTES = 2 << 20
_SHAPE = f"--page-size {PAGE_SIZE} --num-pages 240 --max-rows {NUM_STREAMS} --max-length 512 --token-budget 128"


@dataclass(slots=True, kw_only=True)
class Service:
    rig: Rig
    holder: Child
    scheduler: SchedulerProcess
    client: Client
    worker: Child

    def read(self, texts: Sequence[str], *, resume: bool = False) -> Reading:
        return Reading(self.client, texts, NEW_TOKENS, resume=resume)

    def killed(
        self, texts: Sequence[str], flags: Sequence[str] = (), between: Callable[[], object] = int
    ) -> list[Output]:
        """All completions. The worker is killed when each stream has a page of tokens on average: there are pages to
        keep, and many tokens to come, even if the client reads slowly. Then `between` is called, and a worker with
        these flags starts."""
        reading = self.read(texts)
        reading.wait_tokens(len(texts) * PAGE_SIZE)
        self.worker.kill()
        between()
        self.worker = self.next_worker(flags)
        return reading.result()

    def next_worker(self, flags: Sequence[str]) -> Child:
        """The one after a killed worker."""
        return worker(self.rig, *flags)


def worker(rig: Rig, *flags: str, program: str = "gpu_worker") -> Child:
    return rig.real_worker(*_SHAPE.split(), "--shared-pool", "on", *flags, program=program)


def tokens_of(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prompts()[:NUM_STREAMS]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Rig() as rig:
        holder, first = rig.holder(), worker(rig)
        first.wait_line("waiting for a scheduler")
        scheduler = rig.scheduler(*journal_flags(rig))
        with Client(scheduler.address) as client:
            client.wait_ready(TIMEOUT_SECONDS)
            yield Service(rig=rig, holder=holder, scheduler=scheduler, client=client, worker=first)


@pytest.fixture(scope="module")
def truth(service: Service, texts: list[str]) -> list[list[int]]:
    """The tokens of an undisturbed run."""
    outputs = service.read(texts).result()
    assert [output.recomputed_tokens for output in outputs] == [0] * len(texts)
    service.client.flush_cache()
    return tokens_of(outputs)


def shared_memory(child: Child) -> list[Path]:
    """The memory of the pools that the process holds."""
    return [link for link in Path(f"/proc/{child.pid}/fd").iterdir() if "tandem-kv-pool" in os.readlink(link)]


def test_a_killed_worker_s_pages_are_kept(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    outputs = service.killed(texts)
    assert tokens_of(outputs) == truth
    assert all(output.recomputed_tokens <= PAGE_SIZE + IN_FLIGHT for output in outputs), outputs
    assert any(output.recomputed_tokens for output in outputs), "nobody met the death of the worker"
    service.holder.wait_line("takes pool .* over")
    held = service.client.load().held_pools
    assert (held.pools, held.bytes, held.taken_over, held.damaged_pages) == (0, 0, 1, 0)
    assert held.pages_kept >= NUM_STREAMS
    # The new worker's own pool was given back.
    assert len(shared_memory(service.holder)) == 1


def test_pages_are_kept_over_two_deaths_of_the_scheduler(
    service: Service, texts: list[str], truth: list[list[int]]
) -> None:
    """The third scheduler's generations and steps are larger than those of a service that never restarts."""
    service.client.flush_cache()
    reading, next_ones = service.read(texts, resume=True), list[SchedulerProcess]()
    for pages in (2, 5):
        reading.wait_tokens(pages * PAGE_SIZE * NUM_STREAMS)
        service.scheduler = restarted(service.rig, service.scheduler)
        next_ones.append(service.scheduler)
    outputs = reading.result()
    assert tokens_of(outputs) == truth
    recomputed = [output.recomputed_tokens for output in outputs]
    assert 0 < max(recomputed) <= 2 * (PAGE_SIZE + UNLABELLED), recomputed
    for each in next_ones:
        each.wait_line("has kept [0-9]+ pages")


def test_a_changed_page_is_computed_again(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    service.client.flush_cache()
    [memory] = shared_memory(service.holder)
    size, seen = memory.stat().st_size, len(service.scheduler.lines)

    def damage() -> None:
        with memory.open("r+b") as file, mmap.mmap(file.fileno(), size) as content:
            # One byte in each KiB of the tensors, nothing of the header.
            content[HEADER_BYTES::1024] = bytes(len(range(HEADER_BYTES, size, 1024)))

    outputs = service.killed(texts, between=damage)
    assert tokens_of(outputs) == truth
    assert any(output.recomputed_tokens > PAGE_SIZE + IN_FLIGHT for output in outputs)
    service.scheduler.wait_line("page [0-9]+ of the pool that was taken over has changed since", after=seen)
    assert service.client.load().held_pools.damaged_pages == 1


def test_a_worker_of_another_size_computes_again(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    service.client.flush_cache()
    outputs = service.killed(texts, ["--num-pages", "230"])
    assert tokens_of(outputs) == truth
    held = service.client.load().held_pools
    assert held.pools == 1 and held.pages > 0 and held.bytes > HEADER_BYTES
    assert any(output.recomputed_tokens > PAGE_SIZE + IN_FLIGHT for output in outputs)


def test_a_dead_holder_stops_nobody(service: Service, texts: list[str], truth: list[list[int]]) -> None:
    service.holder.kill()
    service.client.flush_cache()
    assert tokens_of(service.read(texts).result()) == truth
    service.client.flush_cache()
    assert tokens_of(service.killed(texts, ["--shared-pool", "auto"])) == truth
