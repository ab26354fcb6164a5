"""Measures how often sampled text differs from the same request run alone: `python -m tests.benchmarks.divergence`.

The bundled model runs behind the whole service at temperature 0.8 with penalties and a seed per prompt, in float32 and
in bfloat16, with FlexAttention and with the C++ kernels of a CPU. Every round sends the same requests: one after
another, again, batched, with a worker kill in the middle, and with a pool so small that requests are preempted; then
the requests that ran alone are compared between the kernels. Floating-point sums differ between batches, chunks and
kernels, so a nearly tied sample may change; after it the text differs. Up to that token the difference of the logprobs
is measured. Owns the rounds, the comparison and the report.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tandem_client import Client
from tandem_client.sync_stream import GenerateStream
from tandem_client.types import TokenLogprob
from tandem_client.wire.request import GenerateOptions
from tests.rigs.processes import REPOSITORY, Child, Rig

BUNDLED = REPOSITORY / "gpu_worker" / "bundled"
TIMEOUT_SECONDS = 600.0
TEMPERATURE = 0.8
PENALTIES: GenerateOptions = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
TOP_K = 5
# By name, the worker's setting native_kernels.
KERNELS = {"flex": "off", "native": "auto"}
MAX_ROWS = 12
PAGE_SIZE = 16
# Pages for every row at its longest; and for less than half of that, but for at least one row.
ROOMY_PAGES = 256
SMALL_PAGES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of one stream."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    preemptions: int = 0
    worker_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One round compared with the round alone."""

    name: str
    dtype: str = ""
    kernel: str = ""
    streams: int
    diverged: int
    # Output tokens, the tokens from the first difference on, and the first such position in any stream.
    tokens: int
    tokens_beyond: int
    earliest: int | None
    # The largest difference between logprobs of the same token, or the same alternative, after the same text.
    max_logprob_difference: float
    max_prompt_logprob_difference: float
    # Streams that were preempted, and streams that met the worker's death.
    preempted: int
    interrupted: int


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first position where the sequences differ, or None if they are equal."""
    if tuple(one) == tuple(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def logprob_difference(one: Sequence[TokenLogprob], other: Sequence[TokenLogprob]) -> float:
    """Returns the largest difference over tokens and over alternatives in both; 0 if there is nothing to compare."""
    largest = 0.0
    for a, b in zip(one, other, strict=False):
        others = dict(b.top)
        pairs = [(a.logprob, b.logprob), *((value, others[token]) for token, value in a.top if token in others)]
        largest = max(largest, *(abs(x - y) for x, y in pairs))
    return largest


def compare(name: str, alone: Sequence[Answer], answers: Sequence[Answer]) -> Difference:
    """Compares two rounds of the same requests."""
    pairs = list(zip(alone, answers, strict=True))
    places = [first_difference(one.tokens, other.tokens) for one, other in pairs]
    same = [
        logprob_difference(one.logprobs[:place], other.logprobs[:place])
        for (one, other), place in zip(pairs, places, strict=True)
    ]
    return Difference(
        name=name,
        streams=len(pairs),
        diverged=sum(place is not None for place in places),
        tokens=sum(len(other.tokens) for _, other in pairs),
        tokens_beyond=sum(
            len(other.tokens) - place for (_, other), place in zip(pairs, places, strict=True) if place is not None
        ),
        earliest=min((place for place in places if place is not None), default=None),
        max_logprob_difference=max(same, default=0.0),
        max_prompt_logprob_difference=max(
            (logprob_difference(one.prompt_logprobs, other.prompt_logprobs) for one, other in pairs), default=0.0
        ),
        preempted=sum(other.preemptions > 0 for _, other in pairs),
        interrupted=sum(other.worker_changes > 0 for _, other in pairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of every round."""

    texts: tuple[str, ...]
    new_tokens: int

    def start(self, client: Client, number: int) -> GenerateStream:
        return client.generate(
            self.texts[number],
            temperature=TEMPERATURE,
            seed=number,
            max_new_tokens=self.new_tokens,
            ignore_eos=True,
            logprobs=TOP_K,
            prompt_logprobs_start=0,
            timeout=TIMEOUT_SECONDS,
            **PENALTIES,
        )


def read(stream: GenerateStream) -> Answer:
    """Reads the stream to its end."""
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
        arguments = ["gpu_worker", *self._flags, "--num-pages", str(num_pages)]
        child = Child(f"worker of {num_pages} pages", arguments, environment={"OMP_NUM_THREADS": "1"})
        self._rig.children.append(child)
        return child

    def succeed(self, successor: Child) -> None:
        """Kills the worker that serves; `successor` serves alone from now on."""
        self._serving.kill()
        self._serving = successor

    def half_done(self, streams: Sequence[GenerateStream], total: int) -> None:
        """Waits until the service has generated half of `total` tokens, by its own count."""
        limit = self.client.load().output_tokens + total // 2
        while self.client.load().output_tokens < limit and any(stream.summary is None for stream in streams):
            time.sleep(0.01)


def measure(requests: Requests, worker: WorkerKind) -> tuple[list[Answer], list[Difference]]:
    """Runs every round, in order. Returns the answers of requests that ran alone, and the other rounds' differences."""

    def undisturbed(_: Sequence[GenerateStream]) -> None: ...

    with Rig() as rig:
        service = Service(rig, worker)
        client = service.client
        successor = service.worker(ROOMY_PAGES)
        successor.wait_line("joined", TIMEOUT_SECONDS)

        def kill(streams: Sequence[GenerateStream]) -> None:
            service.half_done(streams, len(requests.texts) * requests.new_tokens)
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


def report(found: Sequence[Difference]) -> str:
    """Returns a line per round."""
    head = f"{'dtype':<10}{'kernels':<8}{'round':<14}{'streams':>8}{'diverged':>9}{'rate':>8}"
    head += f"{'tokens beyond':>16}{'earliest':>9}"
    lines = [head + f"{'logprobs':>10}{'prompt':>10}{'preempted':>10}{'killed':>7}"]
    for one in found:
        beyond = f"{one.tokens_beyond} of {one.tokens}"
        line = f"{one.dtype:<10}{one.kernel:<8}{one.name:<14}{one.streams:>8}{one.diverged:>9}"
        line += f"{one.diverged / one.streams:>8.1%}{beyond:>16}"
        line += f"{'-' if one.earliest is None else one.earliest:>9}{one.max_logprob_difference:>10.1e}"
        line += f"{one.max_prompt_logprob_difference:>10.1e}{one.preempted:>10}{one.interrupted:>7}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if every round met its condition."""
    parser = argparse.ArgumentParser(prog="divergence", description=__doc__, allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=64, help="number of bundled prompts (64)")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens per prompt (64)")
    parser.add_argument("--model", type=Path, default=BUNDLED / "model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help="all on a CPU, flex on other devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    if args.prompts < 1:
        parser.error(f"--prompts is {args.prompts}; it must be at least 1")
    lines = (BUNDLED / "prompts.txt").read_text().splitlines()
    count = min(args.prompts, len(lines))
    texts = tuple(lines[i * len(lines) // count] for i in range(count))
    requests = Requests(texts=texts, new_tokens=args.new_tokens)
    found: list[Difference] = []
    for dtype in args.dtypes:
        answers: dict[str, list[Answer]] = {}
        for kernel in args.kernels or (KERNELS if args.device == "cpu" else ["flex"]):
            worker = WorkerKind(model=args.model, device=args.device, dtype=dtype, kernel=kernel)
            alone, differences = measure(requests, worker)
            differences += [compare(f"as {other}", then, alone) for other, then in answers.items()]
            answers[kernel] = alone
            own = [dataclasses.replace(each, dtype=dtype, kernel=kernel) for each in differences]
            lines = [json.dumps(dataclasses.asdict(one)) for one in own] if args.json else report(own).splitlines()
            print("\n".join(lines if args.json or not found else lines[1:]), flush=True)
            found += own
    missed = [
        f"{one.dtype} {one.kernel}: {one.name}"
        for one in found
        if (one.name == "worker killed" and not one.interrupted) or (one.name == "preempted" and not one.preempted)
    ]
    if missed:
        print(f"no stream met {', '.join(missed)}; increase --prompts or --new-tokens", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
