"""Carries out laid-out plans on the device: logits first, then tokens, then their outcome on the host.

Owns the memory of results, and whether the host waits for the device. Usually the tokens follow the logits at once.
With constraints they follow when the masks are there, which need the tokens of the step before: on a GPU the plan stays
begun until then, so that its forward runs meanwhile; on a CPU the masks were asked for before the forward.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.arrays import HostArray
from gpu_worker.geometry import Geometry
from gpu_worker.layout.step_layout import StepLayout
from gpu_worker.shared_pool.pool import PrivatePool, WorkerPool
from gpu_worker.step.constrained import ConstrainedSteps, constrained_steps
from gpu_worker.step.device_step import DeviceStep
from gpu_worker.step.in_flight import InFlight
from gpu_worker.step.output import ResultRing
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import Outcome, Plan


class Execution:
    """The steps of one runner."""

    def __init__(
        self,
        on_device: DeviceStep,
        pool: WorkerPool | PrivatePool,
        geometry: Geometry,
        *,
        is_padded: bool,
        num_buffers: int,
        on_error: Callable[[Outcome, Exception], InFlight],
    ) -> None:
        """num_buffers: for results. on_error: the answer to a plan whose tokens could not be chosen."""
        self._on_device, self._pool, self._on_error, self._geometry = on_device, pool, on_error, geometry
        self.is_asynchronous = on_device.device.type != "cpu"
        # The next step overwrites the results of padded steps; others are read where they were computed.
        self.results: ResultRing | None = None
        if is_padded:
            allocate = partial(torch.zeros, dtype=torch.int64, pin_memory=on_device.device.type == "cuda")
            self.results = ResultRing(num_buffers=num_buffers, num_tokens=geometry.max_rows, allocate=allocate)
        # None: no row may have a constraint, unless another rank of a group chooses its tokens.
        self.constrained: ConstrainedSteps | None = None
        self.follows = False

    def take_constraints(self, join: pb.Join, *, is_leader: bool) -> None:
        """Lets rows have constraints from now on, unless the Join says that they cannot. Raises OSError.

        is_leader: False for the ranks of a group whose tokens another rank chooses.
        """
        self.follows = not is_leader
        if is_leader and not join.constraint_refusal:
            tokenizer, eos = join.tokenizer_json, join.eos_token_ids
            self.constrained = constrained_steps(tokenizer, eos, self._geometry, self._on_device.device)

    def run(self, plan: Plan, layout: StepLayout[HostArray] | None, begun: float) -> InFlight:
        """Runs the plan; on a GPU it only enqueues it, without its tokens if these need masks.

        begun: when the work for the plan began, by time.perf_counter().
        """
        item = InFlight(outcome=Outcome(generation=plan.generation, step=plan.step, status=pb.STEP_STATUS_OK))
        if plan.started is not None:
            self._start_constraints(plan)
        if layout is None and not plan.page_orders:
            return item
        if self.is_asynchronous:
            started = torch.cuda.Event(enable_timing=True)
            started.record()
            item = replace(item, started=started)
        masked = None if self.constrained is None or layout is None else self.constrained.of(layout)
        step = self._on_device.begin(plan.page_orders, layout)
        item = replace(item, begun=step, masked=masked, num_samples=0 if layout is None else layout.num_samples)
        if self.is_asynchronous:
            return item if masked is not None else self._with_tokens(item)
        item = self._with_tokens(item)
        return replace(item, outcome=replace(item.outcome, compute_us=int((time.perf_counter() - begun) * 1e6)))

    def _start_constraints(self, plan: Plan) -> None:
        assert plan.started is not None
        if self.constrained is not None:
            self.constrained.start(plan.started)
        elif any(plan.started.constraints) and not self.follows:
            raise PlanError("started.constraints names a constraint, and this worker takes none")

    def may_choose(self, item: InFlight) -> bool:
        """As `in_flight.Steps`."""
        return item.masked is None or self.constrained is None or self.constrained.are_masked(item.masked)

    def with_tokens(self, item: InFlight) -> InFlight:
        """As `in_flight.Steps`."""
        try:
            return self._with_tokens(item)
        except Exception as error:  # every plan must be answered
            answered = self._on_error(item.outcome, error)
        if answered.outcome.status == pb.STEP_STATUS_OUT_OF_MEMORY:
            self._on_device.free_memory()
        return answered

    def _with_tokens(self, item: InFlight) -> InFlight:
        output, ended = None, None
        if item.begun is not None:
            masks = None if item.masked is None or self.constrained is None else self.constrained.masks(item.masked)
            output = self._on_device.finish(item.begun, masks)
            if self.results is not None:
                output = self.results.to_host(output)
        on_end = self._pool.end_step(item.outcome.step)
        if self.is_asynchronous:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
        return replace(item, begun=None, output=output, on_end=on_end, ended=ended)

    def outcome_of(self, item: InFlight) -> Outcome:
        """As `in_flight.Steps`."""
        outcome = item.finished()
        if self.results is not None and item.output is not None:
            self.results.put_back(item.output)
        if item.masked is not None and self.constrained is not None:
            outcome = self.constrained.judged(item.masked, outcome)
        return outcome
