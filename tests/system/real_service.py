"""The whole service with the bundled model, for tests against the reference: real processes, sockets and client.

Owns the workers' shapes, the reference, and the threads that read streams. Two workers serve: first a worker with a
large pool, then beside it one with a pool too small for its rows, which later serves alone.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tandem_client import Client
from tandem_client.types import Summary
from tandem_client.wire.request import GenerateOptions
from tests.rigs.processes import REPOSITORY, Child, Rig, run
from tests.rigs.waiting import LINGER_SECONDS, TIMEOUT_SECONDS

BUNDLED = REPOSITORY / "gpu_worker" / "bundled"
# Sums of two ranks round differently, so the better of two logits that differ by less may change.
NEAR_TIE = 1e-4
NUM_PROMPTS = 32
NEW_TOKENS = 64
PAGE_SIZE = 16
MAX_ROWS = 12
# Pages for every row at its longest, and for about half of that.
ROOMY_PAGES = 128
SMALL_PAGES = 40
SHAPE = f"--page-size {PAGE_SIZE} --max-rows {MAX_ROWS} --max-length 512 --token-budget 128"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt and the greedy tokens that Transformers computes for it."""

    text: str
    prompt_ids: list[int]
    tokens: list[int]
    # Smallest gap between the best and the second logit along the way.
    margin: float


def prompts() -> list[str]:
    """Returns NUM_PROMPTS of the bundled prompts, evenly spread over the file."""
    lines = (REPOSITORY / "tests" / "bundled_recipe" / "prompts.txt").read_text().splitlines()
    assert len(lines) >= NUM_PROMPTS, f"{len(lines)} prompts; {NUM_PROMPTS} are needed"
    return [lines[i * len(lines) // NUM_PROMPTS] for i in range(NUM_PROMPTS)]


def reference(model: Path, texts: list[str], new_tokens: int) -> list[Case]:
    """What Transformers computes, in a process of its own."""
    asked = json.dumps({"prompts": texts, "new_tokens": new_tokens})
    done = run("tests.rigs.reference_tokens", "--model", str(model), text=asked, **_ONE_THREAD)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    columns = zip(texts, answer["prompt_ids"], answer["tokens"], answer["margins"], strict=True)
    return [Case(text=text, prompt_ids=ids, tokens=tokens, margin=margin) for text, ids, tokens, margin in columns]


@cache
def bundled_cases() -> list[Case]:
    """Those of all prompts with the bundled model. Several modules compare with them."""
    return reference(BUNDLED / "model", prompts(), NEW_TOKENS)


@dataclass(slots=True)
class Output:
    """The output of one stream so far."""

    tokens: list[int] = field(default_factory=list[int])
    prompt_tokens: int = 0
    summary: Summary | None = None

    @property
    def recomputed_tokens(self) -> int:
        """How many were computed again. Call it after the end."""
        assert self.summary is not None
        return self.summary.usage.recomputed_tokens


class Reading:
    """Several greedy streams, started together and read by a thread each."""

    def __init__(
        self,
        client: Client,
        prompts: Sequence[str | list[int]],
        new_tokens: int = NEW_TOKENS,
        *,
        resume: bool = False,
    ) -> None:
        """`resume`: they go on by themselves when they are lost."""
        self.outputs = [Output() for _ in prompts]
        self._client = client
        self._options: GenerateOptions = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        if resume:
            self._options |= {"resume": True, "linger_seconds": LINGER_SECONDS}
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=len(prompts))
        self._tasks = [self._pool.submit(self._read, *pair) for pair in zip(self.outputs, prompts, strict=True)]

    def _read(self, output: Output, prompt: str | list[int]) -> None:
        stream = self._client.generate(prompt, timeout=TIMEOUT_SECONDS, **self._options)
        for delta in stream:
            with self._changed:
                assert delta.token_offset == len(output.tokens) or not delta.token_ids
                output.tokens.extend(delta.token_ids)
                self._changed.notify_all()
        assert stream.accepted is not None
        output.prompt_tokens, output.summary = stream.accepted.prompt_tokens, stream.summary

    def wait_tokens(self, total: int) -> list[list[int]]:
        """Waits until the streams have `total` tokens together. Returns the tokens of each."""
        with self._changed:
            enough = self._changed.wait_for(
                lambda: sum(len(output.tokens) for output in self.outputs) >= total, TIMEOUT_SECONDS
            )
            assert enough, f"fewer than {total} tokens after {TIMEOUT_SECONDS} s"
            return [list(output.tokens) for output in self.outputs]

    def result(self) -> list[Output]:
        """Waits for all streams to end."""
        for task in self._tasks:
            task.result(TIMEOUT_SECONDS)
        self._pool.shutdown()
        return self.outputs


def read_cases(client: Client, cases: Sequence[Case]) -> Reading:
    """Starts a stream for each case. Every other prompt is sent as text: the service must make the same ids of it."""
    return Reading(client, [case.text if i % 2 else case.prompt_ids for i, case in enumerate(cases)])


class RealService:
    """`client` talks to the service. The roomy worker serves first, then both, then the small worker alone."""

    def __init__(
        self,
        rig: Rig,
        program: str = "gpu_worker",
        num_pages: int = ROOMY_PAGES,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = _ONE_THREAD,
    ) -> None:
        """program: the module that runs as a worker. num_pages: of the worker that serves first. flags and environment:
        of workers."""
        self._rig, self._program, self._flags, self._environment = rig, program, flags, environment
        self.roomy: Child = self._start(num_pages)
        self._small: Child | None = None
        scheduler = rig.scheduler()
        self.client = Client(scheduler.address)
        self.client.wait_ready(TIMEOUT_SECONDS)

    def _start(self, num_pages: int) -> Child:
        flags = ("--num-pages", str(num_pages), *SHAPE.split(), *self._flags)
        return self._rig.real_worker(*flags, program=self._program, environment=self._environment)

    def start_small(self) -> Child:
        """Starts the small worker unless it runs."""
        if self._small is None:
            self._small = self._start(SMALL_PAGES)
        return self._small

    def small_serves_alone(self) -> None:
        """Kills the roomy worker, so that the small worker serves alone."""
        self.start_small().wait_line("joined", TIMEOUT_SECONDS)
        if not self.roomy.killed:
            self.roomy.kill()

    def read(self, cases: Sequence[Case]) -> Reading:
        """Starts a stream for each case at once."""
        return read_cases(self.client, cases)


@contextmanager
def real_service(program: str = "gpu_worker", num_pages: int = ROOMY_PAGES, **options: Any) -> Iterator[RealService]:
    """A service in a rig of its own. Arguments: as those of `RealService`."""
    with Rig() as rig:
        service = RealService(rig, program, num_pages, **options)
        yield service
        service.client.close()
