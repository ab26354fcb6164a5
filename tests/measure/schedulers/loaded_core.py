"""Tandem's core under load: running and waiting requests, and a worker that answers every plan with random tokens.

Owns the timing of each call; `tandem.py` chooses the calls. Drives `handle` alone, with the events that a front end and
a worker would send. Its pool is in the steady state of a busy service: every free page holds a cached page of an ended
request, so every allocation evicts one.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.messages.reports import Load, StepReport
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.recording.steps_file import line_of
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.core_events import num_sampled, submit

PAGE_SIZE = 128
ADMITTED_TOKENS = 1024
NUM_WAITING = 10_000
# Steps of one core; its rows grow around the context, and must stay near it.
MOST_STEPS = 700

_FRONTEND, _WORKER = "f-1", "w-1"
VOCAB_SIZE, EOS = 32_000, 2
# As long as a usual SamplingParams.
_SAMPLING = bytes(56)
_ROOT = prefix_root(b"benchmark", "")
# The common beginning of all waiting prompts and one running one, so that lookups find cached pages.
_SHARED_TOKENS = PAGE_SIZE
_FILLER_TOKENS = 32 * PAGE_SIZE
_PREFILL_TOKENS = 65_536
# Requests at the head of the queue that the pool has no room for; the ones behind them are ordinary.
_NUM_HUGE = 64

_T = TypeVar("_T")
Series = dict[str, list[float]]


class LoadedCore:
    """A core with `num_rows` running requests, near `context` tokens each over the next `num_steps` steps."""

    def __init__(
        self,
        num_rows: int,
        context: int,
        num_steps: int,
        *,
        spare_rows: int = 0,
        num_logprobs: int = 0,
        report_steps: bool = False,
        seed: int = 0,
    ) -> None:
        assert num_steps <= MOST_STEPS
        self.num_rows = num_rows
        self.us: Series = {}
        self._rng = np.random.default_rng(seed)
        self._num_logprobs = num_logprobs
        self._plans: deque[Plan] = deque()
        self._now = 0.0
        self._streams = 0
        self.shared = self.tokens(_SHARED_TOKENS)
        # Lengths spread over a page, so that the same number of rows crosses a page boundary in each step.
        lengths = random.Random(seed)
        first, spread = context - num_steps // 2, PAGE_SIZE // 2
        prompts = [self.tokens(lengths.randint(first - spread, first + spread)) for _ in range(num_rows)]
        prompts[0] = np.concatenate([self.shared, prompts[0][: first - PAGE_SIZE // 2]])
        pages_per_row = -(-(first + spread + num_steps) // PAGE_SIZE) + 1
        started = sum(-(-len(prompt) // PAGE_SIZE) for prompt in prompts)
        num_pages = num_rows * pages_per_row + 2 * ADMITTED_TOKENS // PAGE_SIZE
        # More pages than are free at any time.
        self._huge = self.tokens((num_pages - started + 1) * PAGE_SIZE)
        self._core = Scheduler(
            CoreConfig(max_waiting=2 * NUM_WAITING, max_waiting_tokens=1 << 40, report_steps=report_steps)
        )
        self._handle(ev.FrontendJoined(frontend=_FRONTEND))
        rows = num_rows + spare_rows
        sizes = {"page_size": PAGE_SIZE, "max_length": 1 << 22, "token_budget": rows + _PREFILL_TOKENS}
        self._handle(ev.WorkerJoined(worker=_WORKER, info=benchmark_info(rows, num_pages, **sizes)))
        self._fill_index(num_pages)
        for prompt in prompts:
            self.submit(prompt, max_new_tokens=num_steps + 4 * PAGE_SIZE)
        self._settle()
        assert self.load().running == num_rows

    def tokens(self, count: int) -> Int32Array:
        """Returns random tokens without the model's EOS."""
        return self._rng.integers(EOS + 1, VOCAB_SIZE, count, np.int32)

    def _fill_index(self, num_pages: int) -> None:
        """Turns every page of the pool into a cached page of an ended request."""
        for _ in range(-(-num_pages * PAGE_SIZE // _FILLER_TOKENS)):
            self.submit(self.tokens(min(_FILLER_TOKENS, num_pages * PAGE_SIZE)), max_new_tokens=1)
        self._handle(ev.Tick())
        while self._plans:
            self.step()

    def _settle(self) -> None:
        """Runs steps until no request waits and all prompts are computed."""
        self._handle(ev.Tick())
        while self.load().waiting or any(len(plan.chunk_rows) for plan in self._plans):
            self.step()
        self.us.clear()

    def _handle(self, event: ev.Event) -> list[fx.Effect]:
        self._now += 1e-5
        effects = self._core.handle(event, self._now)
        self._plans.extend(effect.plan for effect in effects if isinstance(effect, fx.SendPlan))
        return effects

    def _timed(self, phase: str, call: Callable[[], _T]) -> _T:
        begun = time.process_time_ns()
        value = call()
        self.us.setdefault(phase, []).append((time.process_time_ns() - begun) / 1e3)
        return value

    def load(self) -> Load:
        [reply] = self._handle(ev.LoadQuery(frontend=_FRONTEND, query=0))
        assert isinstance(reply, fx.LoadReply)
        return reply.load

    def submit(
        self,
        prompt: Int32Array,
        max_new_tokens: int,
        hashes: bytes | None = None,
        *,
        root: bytes = _ROOT,
        priority: int = 0,
    ) -> int:
        """Submits a request with its page hashes, as the front end does. Returns its stream number."""
        self._streams += 1
        if hashes is None:
            hashes = self._timed("hash_us", lambda: hash_pages(root, prompt, PAGE_SIZE))
        event = submit(
            self._streams,
            prompt,
            sampling=_SAMPLING,
            max_new_tokens=max_new_tokens,
            ignore_eos=False,
            priority=priority,
            prefix_root=root,
            page_hashes=hashes,
            num_logprobs=self._num_logprobs,
        )
        effects = self._timed("submit_us", lambda: self._handle(event))
        assert any(isinstance(effect, fx.Admitted) for effect in effects), effects
        return self._streams

    def submit_waiting(self, *, huge: bool) -> None:
        """Submits `NUM_WAITING` requests that cannot run: no row is free, or with `huge` the pool is too small."""
        prompts = [self.tokens(ADMITTED_TOKENS) for _ in range(64)]
        first = [self.tokens(len(self._huge)) for _ in range(4)] if huge else []
        for prompt in [*prompts, *first]:
            prompt[: len(self.shared)] = self.shared
        chosen = [first[i % 4] for i in range(_NUM_HUGE)] if huge else []
        chosen += [prompts[i % 64] for i in range(NUM_WAITING - len(chosen))]
        hashes = {id(prompt): hash_pages(_ROOT, prompt, PAGE_SIZE) for prompt in [*prompts, *first]}
        for prompt in chosen:
            self.submit(prompt, 100, hashes[id(prompt)])
        self._handle(ev.Tick())
        self.us.clear()

    def change_head(self) -> None:
        """Puts another head on the queue for a step, and then the first one, which must be checked again."""
        us, self.us = self.us, {}
        # The other head has no page hashes, so its end leaves the CPU caches as they were.
        stream = self.submit(self._huge, 100, b"", root=b"", priority=1_000_000)
        self.steady_step()
        self._handle(ev.Cancel(frontend=_FRONTEND, stream=stream))
        self.us = us

    def take_result(self) -> None:
        """Handles the oldest plan's result and encodes its output."""
        frame = self._result(self._plans.popleft())
        event = self._timed("decode_us", lambda: worker_wire.event_of(pb.WorkerToCore.FromString(frame), _WORKER))
        effects = self._timed("done_us", lambda: self._handle(event))
        for effect in effects:
            if isinstance(effect, fx.StepOutput):
                self._timed("output_us", lambda effect=effect: frontend_wire.frame_of(effect))
            elif isinstance(effect, StepReport):
                self._timed("report_us", lambda effect=effect: line_of(effect, 0.0))

    def tick(self, phase: str = "tick_us") -> Plan | None:
        """Makes and encodes the next plan."""
        effects = self._timed(phase, lambda: self._handle(ev.Tick()))
        plans = [effect.plan for effect in effects if isinstance(effect, fx.SendPlan)]
        for plan in plans:
            frame = self._timed("encode_us", lambda plan=plan: worker_wire.plan_frame(plan))
            self.us.setdefault("plan_bytes", []).append(len(frame))
        return plans[0] if plans else None

    def step(self) -> Plan | None:
        """Handles a result and makes a plan."""
        self.take_result()
        return self.tick()

    def steady_step(self) -> None:
        """Runs a step in which every row decodes and nothing else happens."""
        plan = self.step()
        assert plan is not None and len(plan.decode_rows) == self.num_rows
        assert not plan.starts and not len(plan.chunk_rows)

    def admit(self, prompt: Int32Array, phase: str) -> int:
        """Admits a request beside the running rows and ends it. Returns the number of cached tokens that it found."""
        self.steady_step()
        self.take_result()
        stream = self.submit(prompt, max_new_tokens=100)
        plan = self.tick(phase)
        assert plan is not None and len(plan.starts) == 1
        # The second step confirms the step of its prompt.
        self.step()
        self.step()
        self._handle(ev.Cancel(frontend=_FRONTEND, stream=stream))
        self.step()
        return plan.starts[0].first_position

    def _result(self, plan: Plan) -> bytes:
        num_samples = num_sampled(plan)
        result = pb.StepResult(generation=plan.generation, step=plan.step, status=pb.STEP_STATUS_OK, compute_us=1)
        result.tokens = self.tokens(num_samples).astype("<i4").tobytes()
        if self._num_logprobs:
            top_k = self._num_logprobs - 1
            logprobs = result.logprobs
            logprobs.logprobs = _floats(self._rng, num_samples)
            logprobs.top_k = top_k
            logprobs.top_token_ids = self.tokens(num_samples * top_k).tobytes()
            logprobs.top_logprobs = _floats(self._rng, num_samples * top_k)
        return pb.WorkerToCore(result=result).SerializeToString()


def _floats(rng: np.random.Generator, count: int) -> bytes:
    values: npt.NDArray[np.float32] = rng.random(count, np.float32)
    return values.tobytes()


def benchmark_info(max_rows: int, num_pages: int, **sizes: int) -> WorkerInfo:
    """Returns the info of a worker with `num_pages` pages besides page 0."""
    return WorkerInfo(
        identity="benchmark",
        model="benchmark",
        vocab_size=VOCAB_SIZE,
        num_pages=num_pages + 1,
        max_rows=max_rows,
        chunk_align=64,
        logit_rows=max_rows + 64,
        eos_token_ids=(EOS,),
        pid=0,
        **sizes,
    )
