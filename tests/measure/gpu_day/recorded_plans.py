"""The plans that the core would send for some requests, made before a run and replayed on a runner.

Lengths alone decide what runs when, because no request ends early; so the core is driven with made-up tokens, at once,
and its plans fit any runner of the same sizes. A replay measures the runner without the core, the link or callers.
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tandem.internal.v1 import worker_pb2 as pb
from tandem.v1.inference_pb2 import SamplingParams

from gpu_worker.geometry import Geometry
from gpu_worker.step.in_flight import MAX_IN_FLIGHT
from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import Outcome
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.wire.worker import plan_frame
from tests.measure.gpu_day.workloads import Requests
from tests.rigs.core_events import step_done, submit

_FRONTEND, _WORKER = "f-1", "w-1"


def record_plans(geometry: Geometry, requests: Requests) -> list[pb.StepPlan]:
    """The core's plans for all requests, submitted at once."""
    core = Scheduler(CoreConfig(max_waiting=len(requests.prompts), max_waiting_tokens=1 << 40))
    info = WorkerInfo(
        identity="gpu-day",
        model="gpu-day",
        logit_rows=geometry.logit_rows,
        eos_token_ids=(),
        pid=0,
        **asdict(geometry),
    )
    now = 0.0
    core.handle(ev.FrontendJoined(frontend=_FRONTEND), now)
    core.handle(ev.WorkerJoined(worker=_WORKER, info=info), now)
    for number in range(len(requests.prompts)):
        effects = core.handle(_submit(requests, number), now)
        assert any(isinstance(effect, fx.Admitted) for effect in effects), effects
    plans: list[pb.StepPlan] = []
    in_flight: deque[Plan] = deque()
    while True:
        now += 1e-3
        sent = [effect.plan for effect in core.handle(ev.Tick(), now) if isinstance(effect, fx.SendPlan)]
        plans += [pb.CoreToWorker.FromString(plan_frame(plan)).plan for plan in sent]
        in_flight += sent
        if not in_flight:
            return plans
        core.handle(step_done(_WORKER, in_flight.popleft()), now)


def _submit(requests: Requests, number: int) -> ev.Submit:
    # A complete SamplingParams, as a front end makes them.
    sampling = SamplingParams(
        temperature=requests.temperature,
        top_p=1,
        top_k=0,
        min_p=0,
        typical_p=1,
        seed=number,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
    )
    return submit(
        number + 1,
        requests.prompts[number],
        sampling=sampling.SerializeToString(),
        max_new_tokens=requests.output_lengths[number],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The outcomes of a replay, in the order of the plans."""

    outcomes: list[Outcome]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(outcome.tokens.size for outcome in self.outcomes)

    @property
    def compute_seconds(self) -> float:
        """The device's time in the steps, by its own clock; on a CPU the time of `submit`."""
        return sum(outcome.compute_us for outcome in self.outcomes) / 1e6

    def tokens(self) -> list[list[int]]:
        return [outcome.tokens.tolist() for outcome in self.outcomes]


def replay(
    runner: Runner,
    plans: list[pb.StepPlan],
    *,
    generation: int,
    in_flight: int = MAX_IN_FLIGHT,
    on_step: Callable[[Outcome], None] = lambda outcome: None,
) -> Replay:
    """Runs the plans with up to `in_flight` of them submitted. `generation` must be larger than in replays before.

    Calls `on_step` with each outcome.
    """
    for plan in plans:
        plan.generation = generation
    outcomes: list[Outcome] = []
    # As in a worker: a full collection would visit all objects of torch and Transformers.
    gc.freeze()
    begun = time.perf_counter()
    for plan in plans:
        while runner.num_in_flight >= in_flight:
            outcomes.append(_collected(runner))
            on_step(outcomes[-1])
        runner.submit(plan)
    while runner.num_in_flight:
        outcomes.append(_collected(runner))
        on_step(outcomes[-1])
    seconds = time.perf_counter() - begun
    gc.unfreeze()
    return Replay(outcomes=outcomes, seconds=seconds)


def _collected(runner: Runner) -> Outcome:
    outcome = runner.collect()
    assert outcome is not None
    assert outcome.status == pb.STEP_STATUS_OK, f"step {outcome.step}: {outcome.detail}"
    assert outcome.nonfinite.size == 0, f"step {outcome.step} gave values that are not finite"
    return outcome
