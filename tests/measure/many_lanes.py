"""The core with many lanes: what it costs to seat new requests, and to plan a decode step of every lane.

`python -m tests.measure.core --lanes 64` runs it. Every lane has `ROWS_PER_LANE` running rows and room for more;
then `NUM_NEW` requests arrive between two ticks. The workers answer every plan with random tokens, at once. Figures are
process CPU time, in ms, medians over all repeats. Drives `Scheduler.handle` alone and needs no torch.
"""

import time
from collections import deque
from typing import Any

import numpy as np

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.scheduler import Scheduler
from tests.measure.harness import Bar, Measurement
from tests.measure.schedulers.loaded_core import EOS, VOCAB_SIZE, benchmark_info
from tests.rigs.core_events import num_sampled, step_done, submit

ROWS_PER_LANE, NUM_NEW, PROMPT_TOKENS, NUM_PREFIXES = 48, 200, 512, 64
SEATING_MS, DECODE_MS = 60.0, 10.0
"""The bars, for 64 lanes."""
_PAGE_SIZE = 64
_ROOT = prefix_root(b"benchmark", "")


class ManyLanes:
    """A core with `num_lanes` workers of `rows` running rows each."""

    def __init__(self, num_lanes: int, rows: int, *, num_prefixes: int = 0, seed: int = 0) -> None:
        """With `num_prefixes`, the first half of each prompt is one of as many beginnings; otherwise all differ."""
        self._rng = np.random.default_rng(seed)
        self._now, self._streams = 0.0, 0
        self._plans: deque[tuple[str, Plan]] = deque()
        self._prefixes = [self._tokens(PROMPT_TOKENS // 2) for _ in range(num_prefixes)]
        self._core = Scheduler(CoreConfig(max_waiting=100_000, max_waiting_tokens=1 << 40, prove_workers=False))
        self._handle(ev.FrontendJoined(frontend="f-1"))
        info = benchmark_info(2 * rows, 2 * rows * 16, page_size=_PAGE_SIZE, max_length=4096, token_budget=8192)
        for number in range(num_lanes):
            self._handle(ev.WorkerJoined(worker=f"w-{number}", info=info))
        for _ in range(num_lanes * rows):
            self.submit()
        self.tick()
        self._seat()
        self._settle()

    def _seat(self) -> list[float]:
        """Runs until all requests have a row. Returns the ms of each tick."""
        ticks: list[float] = []
        while self._core.queue.num_waiting:
            ticks.append(self.decode())
        return ticks

    def _settle(self) -> None:
        for _ in range(4):
            self.decode()

    def _tokens(self, count: int) -> Int32Array:
        return self._rng.integers(EOS + 1, VOCAB_SIZE, count, np.int32)

    def _handle(self, event: ev.Event) -> None:
        self._now += 1e-6
        for effect in self._core.handle(event, self._now):
            if isinstance(effect, fx.SendPlan):
                self._plans.append((effect.worker, effect.plan))

    def submit(self) -> int:
        """Submits a request. Returns its stream."""
        self._streams += 1
        prompt = self._tokens(PROMPT_TOKENS)
        if self._prefixes:
            prefix = self._prefixes[self._streams * 7 % len(self._prefixes)]
            prompt[: len(prefix)] = prefix
        self._handle(
            submit(
                self._streams,
                prompt,
                sampling=bytes(56),
                max_new_tokens=400,
                prefix_root=_ROOT,
                page_hashes=hash_pages(_ROOT, prompt, _PAGE_SIZE),
            )
        )
        return self._streams

    def tick(self) -> float:
        """Makes the next plans of all lanes. Returns the ms that it took."""
        begun = time.process_time_ns()
        self._handle(ev.Tick())
        return (time.process_time_ns() - begun) / 1e6

    def answer(self) -> None:
        """Answers the oldest plan of every lane."""
        answered = set[str]()
        for _ in range(len(self._plans)):
            worker, plan = self._plans.popleft()
            if worker in answered:
                self._plans.append((worker, plan))
                continue
            answered.add(worker)
            self._handle(step_done(worker, plan, self._tokens(num_sampled(plan))))

    def arrive(self, count: int) -> tuple[list[float], int]:
        """Lets `count` requests arrive. Returns the ms of each tick until all have a row, and the first one's seats.

        Ends them then, so that the next call finds the same core.
        """
        self.answer()
        streams = [self.submit() for _ in range(count)]
        first = self.tick()
        seated = count - self._core.queue.num_waiting
        ticks = [first, *self._seat()]
        for stream in streams:
            self._handle(ev.Cancel(frontend="f-1", stream=stream))
        self._settle()
        return ticks, seated

    def decode(self) -> float:
        """Returns the ms of a tick in which every lane decodes."""
        self.answer()
        return self.tick()


def measure(num_lanes: int, rows: int, num_new: int, *, num_prefixes: int, repeats: int) -> dict[str, Any]:
    """Returns the figures of one core, as medians over the repeats.

    `seating_ms` is the time of all ticks until all new requests have a row, `tick_ms` that of the longest tick.
    """
    core = ManyLanes(num_lanes, rows, num_prefixes=num_prefixes)
    seating: list[tuple[list[float], int]] = []
    decoding: list[float] = []
    for _ in range(repeats):
        seating.append(core.arrive(num_new))
        decoding += [core.decode() for _ in range(4)]
    return {
        "lanes": num_lanes,
        "rows": rows,
        "new": num_new,
        "prefixes": num_prefixes,
        "seating_ms": float(np.median([sum(ticks) for ticks, _ in seating])),
        "tick_ms": float(np.median([max(ticks) for ticks, _ in seating])),
        "seated_at_once": min(seated for _, seated in seating),
        "decode_ms": float(np.median(decoding)),
    }


def judged(line: dict[str, Any]) -> list[Bar]:
    """Returns the bars for a line of 64 lanes."""
    if (line["lanes"], line["rows"], line["new"]) != (64, ROWS_PER_LANE, NUM_NEW):
        return []
    kind = f"64 lanes, {line['prefixes']} prefixes"
    return [
        Bar(name=f"ms until {NUM_NEW} requests have a row, {kind}", value=line["seating_ms"], limit=SEATING_MS),
        Bar(name=f"ms of a decode tick, {kind}", value=line["decode_ms"], limit=DECODE_MS),
    ]


def run(measurement: Measurement, num_lanes: int) -> None:
    """Measures without and with shared prefixes, and prints figures and bars."""
    for num_prefixes in (0, NUM_PREFIXES):
        line = measure(num_lanes, ROWS_PER_LANE, NUM_NEW, num_prefixes=num_prefixes, repeats=5)
        measurement.line(line)
        measurement.bar(*judged(line))
