"""What the core costs: `python -m tests.benchmarks.core [--json]`.

Drives `scheduler_svc.core` alone, with a worker that answers every plan with random tokens at once. One steady step is
one result taken in and one tick that plans; the protobuf frames beside it are measured on their own. Needs no torch.
"""

import argparse
import cProfile
import json
import platform
import pstats
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc import frontend_wire, worker_wire
from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.steps import line_of
from tests.benchmarks.percentiles import percentiles

FRONTEND, WORKER = "f-1", "w-1"
VOCAB_SIZE = 32_000
PAGE_SIZE = 128
CONTEXT_TOKENS = 512
ADMITTED_TOKENS = 1024
# The running requests last longer than any measurement.
MOST_STEPS = 8000
NUM_ROWS = (32, 256, 1024)
BAR_ROWS, BAR_US = 256, 1000.0


class Bench:
    """A core with `num_rows` requests running, and room for one more; every phase's microseconds in `us`."""

    def __init__(self, num_rows: int, seed: int = 0, *, report_steps: bool = False, num_logprobs: int = 0) -> None:
        self.us: dict[str, list[float]] = {}
        self._rng = np.random.default_rng(seed)
        self._lengths = random.Random(seed)
        config = CoreConfig(max_waiting=num_rows + 1, max_waiting_tokens=1 << 30, report_steps=report_steps)
        self._core = Scheduler(config)
        self._plans: deque[Plan] = deque()
        self._now = 0.0
        self._streams = 0
        self._extras = ev.Extras(num_logprobs=num_logprobs) if num_logprobs else None
        self.num_rows = num_rows
        self._handle(ev.FrontendJoined(frontend=FRONTEND))
        self._handle(ev.WorkerJoined(worker=WORKER, info=_info(num_rows)))
        for _ in range(num_rows):
            # Half a page around the context, so that page edges are crossed all the time and not all at once.
            spread = self._lengths.randint(-PAGE_SIZE // 2, PAGE_SIZE // 2)
            self.submit(CONTEXT_TOKENS + spread, max_new_tokens=MOST_STEPS + PAGE_SIZE)
        self._handle(ev.Tick())
        while self._core.book.num_waiting or any(len(plan.chunk_rows) for plan in self._plans):
            self.step()
        self.us.clear()

    def _handle(self, event: ev.Event) -> list[fx.Effect]:
        self._now += 1e-5
        effects = self._core.handle(event, self._now)
        self._plans.extend(effect.plan for effect in effects if isinstance(effect, fx.SendPlan))
        return effects

    def _timed(self, phase: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter_ns()
        value = call()
        self.us.setdefault(phase, []).append((time.perf_counter_ns() - begun) / 1e3)
        return value

    def submit(self, num_tokens: int, max_new_tokens: int) -> int:
        """Its stream."""
        self._streams += 1
        event = ev.Submit(
            frontend=FRONTEND,
            stream=self._streams,
            request_id=f"r-{self._streams}",
            prompt=self._rng.integers(0, VOCAB_SIZE, num_tokens, np.int32),
            sampling=ev.Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, extras=self._extras),
            max_new_tokens=max_new_tokens,
            min_new_tokens=0,
            stop_token_ids=(),
            ignore_eos=True,
            priority=0,
            max_time_seconds=0,
            deadline_seconds=0,
        )
        self._timed("submit", lambda: self._handle(event))
        return self._streams

    def cancel(self, stream: int) -> None:
        """Frees its row."""
        self._handle(ev.Cancel(frontend=FRONTEND, stream=stream))

    def take_result(self) -> None:
        """The oldest plan's result comes in, and its tokens go out."""
        frame = self._result(self._plans.popleft())
        event = self._timed("decode result", lambda: worker_wire.event_of(worker_wire.parse(frame), WORKER))
        effects = self._timed("step done", lambda: self._handle(event))
        for effect in effects:
            if isinstance(effect, fx.StepOutput):
                self._timed("encode output", lambda effect=effect: frontend_wire.frame_of(effect))
            elif isinstance(effect, fx.StepReport):
                self._timed("format report", lambda effect=effect: line_of(effect, 0.0))

    def tick(self, phase: str = "tick") -> None:
        """The next plan is made and encoded."""
        effects = self._timed(phase, lambda: self._handle(ev.Tick()))
        for effect in effects:
            if isinstance(effect, fx.SendPlan):
                self._timed("encode plan", lambda effect=effect: worker_wire.plan_frame(effect.plan))

    def step(self) -> None:
        """One steady step: a result in, a plan out."""
        self.take_result()
        self.tick()

    def _result(self, plan: Plan) -> bytes:
        num_samples = int(plan.chunk_samples.sum()) + len(plan.decode_rows)
        result = pb.StepResult(generation=plan.generation, step=plan.step, status=pb.STEP_STATUS_OK, compute_us=1)
        result.tokens = self._rng.integers(0, VOCAB_SIZE, num_samples, np.int32).astype("<i4").tobytes()
        if self._extras is not None:
            top_k = self._extras.num_logprobs - 1
            told = result.logprobs
            told.logprobs = self._rng.random(num_samples, np.float32).tobytes()
            told.top_k = top_k
            told.top_token_ids = self._rng.integers(0, VOCAB_SIZE, num_samples * top_k, np.int32).tobytes()
            told.top_logprobs = self._rng.random(num_samples * top_k, np.float32).tobytes()
        return pb.WorkerToCore(result=result).SerializeToString()


def _info(num_rows: int) -> ev.WorkerInfo:
    pages_per_row = (CONTEXT_TOKENS + MOST_STEPS) // PAGE_SIZE + 2
    return ev.WorkerInfo(
        identity="benchmark",
        model="benchmark",
        vocab_size=VOCAB_SIZE,
        page_size=PAGE_SIZE,
        num_pages=(num_rows + 1) * pages_per_row + 1,
        max_rows=num_rows + 1,
        max_length=1 << 20,
        token_budget=num_rows + 8192,
        chunk_align=64,
        logit_rows=num_rows + 1 + 64,
        eos_token_ids=(2,),
        pid=0,
    )


def steady(
    num_rows: int, num_steps: int, *, report_steps: bool = False, num_logprobs: int = 0
) -> dict[str, dict[str, float]]:
    """Microseconds per phase, `core` being the result taken in and the tick, `frames` the three messages."""
    bench = Bench(num_rows, report_steps=report_steps, num_logprobs=num_logprobs)
    for _ in range(num_steps // 10):
        bench.step()
    bench.us.clear()
    for _ in range(num_steps):
        bench.step()
    us = {phase: np.array(values) for phase, values in bench.us.items()}
    us["core"] = us["step done"] + us["tick"]
    us["frames"] = us["decode result"] + us["encode output"] + us["encode plan"]
    return {phase: percentiles(values.tolist()) for phase, values in us.items()}


def admission(num_rows: int, num_times: int) -> dict[str, dict[str, float]]:
    """Microseconds of taking a prompt in, and of the tick that admits it beside `num_rows` decoding rows."""
    bench = Bench(num_rows)
    for _ in range(num_times):
        bench.take_result()
        stream = bench.submit(ADMITTED_TOKENS, max_new_tokens=100)
        bench.tick("tick that admits")
        bench.step()
        bench.cancel(stream)
        bench.step()
    wanted = ("submit", "tick that admits")
    return {phase: percentiles(values) for phase, values in bench.us.items() if phase in wanted}


def profile(num_rows: int, num_steps: int) -> None:
    """Where a step's time goes, on stderr."""
    bench = Bench(num_rows)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        bench.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(22)


def main() -> int:
    """Exit code 1 where the bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.core", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--report-steps", action="store_true", help="with the reports that --steps FILE asks for")
    parser.add_argument("--logprobs", type=int, metavar="K", help="every row wants logprobs, with K alternatives")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile so many rows instead")
    args = parser.parse_args()
    if not 20 <= args.steps <= MOST_STEPS // 2:
        parser.error(f"--steps is {args.steps}; it must be 20 to {MOST_STEPS // 2}")
    if args.profile:
        profile(args.profile, args.steps)
        return 0
    num_logprobs = 0 if args.logprobs is None else 1 + args.logprobs
    lines: list[dict[str, Any]] = []
    for num_rows in NUM_ROWS:
        lines.append(
            {
                "what": "steady step",
                "rows": num_rows,
                "us": steady(num_rows, args.steps, report_steps=args.report_steps, num_logprobs=num_logprobs),
            }
        )
        lines.append({"what": "admission", "rows": num_rows, "us": admission(num_rows, max(20, args.steps // 10))})
    for line in lines:
        if args.json:
            print(json.dumps(line))
            continue
        tokens = f"{ADMITTED_TOKENS}-token prompt" if line["what"] == "admission" else f"~{CONTEXT_TOKENS} tokens each"
        print(f"{line['what']}, {line['rows']} rows running, {tokens}:")
        for phase, us in line["us"].items():
            print(f"  {phase:<18} {us['p50']:8.0f} us   p90 {us['p90']:8.0f}   p99 {us['p99']:8.0f}")
    [at_bar] = [line["us"]["core"]["p50"] for line in lines if line["rows"] == BAR_ROWS and "core" in line["us"]]
    met = at_bar < BAR_US
    bar = {"bar": f"core step at {BAR_ROWS} rows under {BAR_US:.0f} us", "median_us": at_bar, "met": met}
    print(json.dumps(bar) if args.json else f"{bar['bar']}: {at_bar:.0f} us, {'met' if met else 'MISSED'}")
    if not args.json:
        print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
