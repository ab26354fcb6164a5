"""The service under test, its requests, and the rounds: alone, again, batched, with a worker kill, preempted."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tandem_client import Client
from tandem_client.sync_client import GenerateStream
from tandem_client.wire.request import GenerateOptions
from tests.measure.divergence.compare import Answer, Difference, compare
from tests.rigs.processes import REPOSITORY, Child, Rig

BUNDLED = REPOSITORY / "gpu_worker" / "bundled"
TIMEOUT_SECONDS = 600.0
SAMPLED: GenerateOptions = {
    "temperature": 0.8,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logprobs": 5,
    "prompt_logprobs_start": 0,
}
# By name, the worker's setting native_kernels.
KERNELS = {"torch": "off", "native": "auto"}
MAX_ROWS = 12
PAGE_SIZE = 16
# Pages for every row at its longest; and for less than half of that, but for at least one row.
ROOMY_PAGES = 256
SMALL_PAGES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of every round."""

    texts: tuple[str, ...]
    new_tokens: int
    options: GenerateOptions

    def start(self, client: Client, number: int) -> GenerateStream:
        return client.generate(
            self.texts[number],
            seed=number,
            max_new_tokens=self.new_tokens,
            ignore_eos=True,
            timeout=TIMEOUT_SECONDS,
            **self.options,
        )


def read(stream: GenerateStream) -> Answer:
    for _ in stream:
        pass
    [sample] = stream.samples
    assert stream.summary is not None
    prompt = stream.prompt_info.logprobs if stream.prompt_info is not None else ()
    return Answer(
        tokens=tuple(sample.token_ids),
        logprobs=tuple(sample.logprobs),
        prompt_logprobs=prompt,
        preemptions=stream.summary.timing.preemptions,
        worker_changes=stream.summary.timing.worker_changes,
    )


def together(client: Client, requests: Requests, meanwhile: Callable[[Sequence[GenerateStream]], None]) -> list[Answer]:
    """Runs all requests at once; calls `meanwhile` once all have started."""
    streams = [requests.start(client, number) for number in range(len(requests.texts))]
    with ThreadPoolExecutor(max_workers=len(streams)) as pool:
        answers = [pool.submit(read, stream) for stream in streams]
        meanwhile(streams)
        return [answer.result() for answer in answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """How the workers of a service compute."""

    model: Path
    device: str
    dtype: str
    # A key of KERNELS.
    kernel: str


class Service:
    """A scheduler and a succession of workers; a new worker joins before the old one is killed."""

    def __init__(self, rig: Rig, worker: "WorkerKind") -> None:
        self._rig = rig
        self._flags = ["--runtime-dir", str(rig.runtime_dir), "--model", str(worker.model), "--device", worker.device]
        self._flags += ["--dtype", worker.dtype, "--native-kernels", KERNELS[worker.kernel]]
        self._flags += ["--page-size", str(PAGE_SIZE), "--max-rows", str(MAX_ROWS), "--max-length", "512"]
        self._flags += ["--token-budget", "128", "--exit-with-parent"]
        self._serving = self.worker(ROOMY_PAGES)
        self.client = Client(rig.scheduler().address)
        self.client.wait_ready(TIMEOUT_SECONDS)

    def worker(self, num_pages: int) -> Child:
        arguments = ("gpu_worker", *self._flags, "--num-pages", str(num_pages))
        return self._rig.start(f"worker of {num_pages} pages", *arguments, environment={"OMP_NUM_THREADS": "1"})

    def succeed(self, successor: Child) -> None:
        """Kills the worker that serves; `successor` serves alone from now on."""
        self._serving.kill()
        self._serving = successor


def measure(requests: Requests, worker: WorkerKind) -> tuple[list[Answer], list[Difference]]:
    """Runs every round, in order. Returns the answers of requests that ran alone, and the other rounds' differences."""

    def undisturbed(_: Sequence[GenerateStream]) -> None: ...

    with Rig() as rig:
        service = Service(rig, worker)
        client = service.client
        successor = service.worker(ROOMY_PAGES)
        successor.wait_line("joined", TIMEOUT_SECONDS)

        def kill(streams: Sequence[GenerateStream]) -> None:
            # Half of all tokens are there, by the service's own count.
            limit = client.load().output_tokens + len(requests.texts) * requests.new_tokens // 2
            while client.load().output_tokens < limit and any(stream.summary is None for stream in streams):
                time.sleep(0.01)
            service.succeed(successor)

        alone, again = ([read(requests.start(client, n)) for n in range(len(requests.texts))] for _ in range(2))
        found = [compare("alone again", alone, again)]
        found.append(compare("batched", alone, together(client, requests, undisturbed)))
        found.append(compare("worker killed", alone, together(client, requests, kill)))
        small = service.worker(SMALL_PAGES)
        small.wait_line("joined", TIMEOUT_SECONDS)
        service.succeed(small)
        found.append(compare("preempted", alone, together(client, requests, undisturbed)))
        client.close()
        return alone, found
