"""Workers with the pool of a GPU die under streams, and others take it over. The driver is fake, all else is real.

The undisturbed run of the same prompts is the truth.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_client import Client
from tests.rigs.processes import Child, Rig
from tests.rigs.waiting import until
from tests.system.real_service import TIMEOUT_SECONDS, prompts
from tests.system.test_shared_pool import IN_FLIGHT, NUM_STREAMS, PAGE_SIZE, Service, tokens_of, worker

PROGRAM = "tests.rigs.fake_gpu_worker"


@dataclass(slots=True, kw_only=True)
class GpuService(Service):
    """A service; its next worker may be one that waits on standby."""

    waiting: Child | None = None

    def wait_on_standby(self) -> None:
        """Starts a worker, and returns when it waits."""
        self.waiting = worker(self.rig, "--standby", "--standby-pages", "160", program=PROGRAM)
        self.waiting.wait_line("joined")
        until(lambda: self.client.load().standby_workers == 1)

    def next_worker(self, flags: Sequence[str]) -> Child:
        """The one that waits, or a new one."""
        found, self.waiting = self.waiting, None
        return found or worker(self.rig, *flags, program=PROGRAM)


@pytest.fixture
def service() -> Iterator[GpuService]:
    with Rig() as rig:
        holder = rig.holder()
        first = worker(rig, "--standbys", "1", program=PROGRAM)
        first.wait_line("waiting for a scheduler")
        scheduler = rig.scheduler()
        with Client(scheduler.address) as client:
            client.wait_ready(TIMEOUT_SECONDS)
            yield GpuService(rig=rig, holder=holder, scheduler=scheduler, client=client, worker=first)


def device_memories(child: Child) -> int:
    """Descriptors of device memory that the process has."""
    links = Path(f"/proc/{child.pid}/fd").iterdir()
    return sum("fake-device-memory" in os.readlink(link) for link in links)


@pytest.mark.long
def test_the_pool_goes_from_worker_to_worker(service: GpuService) -> None:
    texts = prompts()[:NUM_STREAMS]
    # Without cached pages nothing is taken over: the worker on standby gets memory of its own.
    service.wait_on_standby()
    service.worker.kill()
    service.worker = service.next_worker(())
    truth = tokens_of(service.read(texts).result())
    service.wait_on_standby()
    # The next one on standby takes the pool over, and then one that starts after the death of that one.
    for _ in range(2):
        service.client.flush_cache()
        seen = len(service.holder.lines)
        outputs = service.killed(texts)
        assert tokens_of(outputs) == truth
        assert all(output.recomputed_tokens <= PAGE_SIZE + IN_FLIGHT for output in outputs), outputs
        assert any(output.recomputed_tokens for output in outputs), "nobody met the death of the worker"
        service.holder.wait_line("takes pool .* over", after=seen)
        # This pool, and that of the first worker, which no worker needs; a worker that waits has none.
        assert device_memories(service.holder) == 2
