"""The scheduler dies and is started again, twice: the real worker keeps its pages, and little is computed again.

The real worker with the bundled model, its pool in shared memory. The undisturbed run of the same prompts is the truth.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem_client import Client
from tests.rigs.processes import Child, Rig
from tests.rigs.waiting import LINGER_SECONDS
from tests.system.real_service import TIMEOUT_SECONDS, prompts
from tests.system.test_scheduler_loss import journal_flags, restarted

PAGE_SIZE, NUM_STREAMS, NEW_TOKENS = 16, 8, 160
# Two plans may be in flight, and the label of a page goes with a later plan than the one that filled it.
IN_FLIGHT = 4
_SHAPE = (
    f"--page-size {PAGE_SIZE} --num-pages 160 --max-rows {NUM_STREAMS} --max-length 512 --token-budget 128 --threads 1 "
    "--device cpu --shared-pool on"
)


def _worker(rig: Rig) -> Child:
    arguments = ["gpu_worker", "--runtime-dir", str(rig.runtime_dir), *_SHAPE.split(), "--exit-with-parent"]
    child = Child("worker", arguments, environment={"OMP_NUM_THREADS": "1"})
    rig.children.append(child)
    return child


class _Streams:
    """Completions of all texts at once."""

    def __init__(self, client: Client, texts: Sequence[str]) -> None:
        self._client, self._changed = client, threading.Condition()
        self._num_tokens = [0] * len(texts)
        with ThreadPoolExecutor(len(texts)) as threads:
            self._tasks = [threads.submit(self._read, i, text) for i, text in enumerate(texts)]
            self.during()

    def during(self) -> None:
        """What happens meanwhile."""

    def wait_pages(self, count: int) -> None:
        """Waits until each stream has as many pages of tokens on average."""
        due = count * PAGE_SIZE * len(self._num_tokens)
        with self._changed:
            assert self._changed.wait_for(lambda: sum(self._num_tokens) >= due, TIMEOUT_SECONDS)

    @property
    def results(self) -> list[tuple[list[int], int]]:
        """The tokens of each, and how many were computed again."""
        return [task.result() for task in self._tasks]

    def _read(self, i: int, text: str) -> tuple[list[int], int]:
        stream = self._client.generate(
            text,
            temperature=0.0,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            timeout=TIMEOUT_SECONDS,
            resume=True,
            linger_seconds=LINGER_SECONDS,
        )
        tokens: list[int] = []
        for delta in stream:
            tokens += delta.token_ids
            with self._changed:
                self._num_tokens[i] = len(tokens)
                self._changed.notify_all()
        assert stream.summary is not None
        return tokens, stream.summary.usage.recomputed_tokens


def test_a_worker_keeps_its_pages_over_two_deaths_of_the_scheduler(rig: Rig) -> None:
    """The third scheduler's generations and steps are larger than those of a service that never restarts."""
    holder = Child("holder", ["gpu_worker.holder", "--runtime-dir", str(rig.runtime_dir), "--exit-with-parent"])
    rig.children.append(holder)
    holder.wait_line("holds pools")
    worker = _worker(rig)
    worker.wait_line("waiting for a scheduler")
    scheduler = rig.scheduler(*journal_flags(rig))
    texts = prompts()[:NUM_STREAMS]

    class Disturbed(_Streams):
        def during(self) -> None:
            self.schedulers = [scheduler]
            for pages in (2, 5):
                self.wait_pages(pages)
                self.schedulers.append(restarted(rig, self.schedulers[-1]))

    with Client(scheduler.address) as client:
        client.wait_ready(TIMEOUT_SECONDS)
        truth = [tokens for tokens, _ in _Streams(client, texts).results]
        client.flush_cache()
        disturbed = Disturbed(client, texts)
        assert [tokens for tokens, _ in disturbed.results] == truth
    recomputed = [count for _, count in disturbed.results]
    assert 0 < max(recomputed) <= 2 * (PAGE_SIZE + IN_FLIGHT), recomputed
    for each in disturbed.schedulers[1:]:
        each.wait_line("has kept [0-9]+ pages")
