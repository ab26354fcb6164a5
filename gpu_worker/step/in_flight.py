"""Carries out laid-out plans on the device, in order: logits first, then tokens, then their outcome on the host.

Usually the tokens follow the logits at once. With constraints they follow when the masks are there, which need the
tokens of the step before: where a forward runs while the host goes on, the plan stays begun until then; elsewhere the
masks were asked for before the forward.

Owns, too, the order of plans that are begun, have tokens that are being computed, or are settled with an outcome; and
what follows for all of them if the device is lost.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor

from gpu_worker.arrays import HostArray
from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.frames import Sizes
from gpu_worker.failures import first_line
from gpu_worker.layout.step_layout import StepExtras, StepInputs, StepLayout
from gpu_worker.shared_pool.pool import PrivatePool, WorkerPool
from gpu_worker.step.backend import StepBackend, StepTimer
from gpu_worker.step.constrained import ConstrainedSteps, MaskedSamples
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.output import BegunStep, StepOutput
from gpu_worker.trees import mapped
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import NO_TOKENS, Outcome, Plan
from gpu_worker.wire.page_orders import PageOrders

MAX_IN_FLIGHT = 2


class DeviceLost(RuntimeError):
    """The device's context is unusable; only a new process can use the device again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A submitted plan. `begun` and `output` are None if its outcome is settled."""

    outcome: Outcome
    # Without tokens: they follow.
    begun: BegunStep | None = None
    output: StepOutput | None = None
    num_samples: int = 0
    # The samples with constraints; None if there are none.
    masked: MaskedSamples | None = None
    # When the host's work for the plan began, by time.perf_counter(); and its timer, if its work goes on by itself.
    since: float = 0.0
    timer: StepTimer | None = None
    # To be called when the step has ended well.
    on_end: Callable[[], None] | None = None


class Execution:
    """The submitted plans of one runner without a collected outcome, the oldest first, from a layout to an outcome."""

    def __init__(
        self,
        on_device: DeviceModel,
        steps: StepBackend,
        pool: WorkerPool | PrivatePool,
        *,
        on_error: Callable[[Outcome, Exception], InFlight],
    ) -> None:
        """on_error: the answer to a plan if its tokens could not be chosen."""
        self._on_device, self._steps, self._pool, self._on_error = on_device, steps, pool, on_error
        # None: no row may have a constraint, unless another rank of a group chooses its tokens.
        self.constrained: ConstrainedSteps | None = None
        self.follows = False
        self._items = deque[InFlight]()
        # Why the device is unusable, empty if it is usable.
        self.lost = ""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def newest(self) -> InFlight:
        return self._items[-1]

    def take_constraints(self, join: pb.Join, *, is_leader: bool) -> None:
        """Lets rows have constraints from now on, unless the Join says that they cannot. Raises OSError.

        is_leader: False for the ranks of a group that get their tokens from another rank.
        """
        self.follows = not is_leader
        if is_leader and not join.constraint_refusal:
            geometry = self._on_device.geometry
            sizes = Sizes(max_rows=geometry.max_rows, vocab_size=geometry.vocab_size, max_length=geometry.max_length)
            upload = self._steps.mask_upload(max_rows=geometry.max_rows, mask_words=sizes.mask_words)
            constraints = Constraints(join.tokenizer_json, sizes, join.eos_token_ids)
            self.constrained = ConstrainedSteps(constraints, upload)

    def run(self, plan: Plan, layout: StepLayout[HostArray] | None, since: float) -> InFlight:
        """Runs the plan, or only enqueues it; without its tokens if these wait for masks.

        since: when the work for the plan began, by time.perf_counter().
        """
        outcome = Outcome(generation=plan.generation, step=plan.step, status=pb.STEP_STATUS_OK)
        if plan.started is not None and self.constrained is not None:
            self.constrained.start(plan.started)
        elif plan.started is not None and any(plan.started.constraints) and not self.follows:
            raise PlanError("started.constraints names a constraint, and this worker takes none")
        if layout is None and not plan.page_orders:
            return InFlight(outcome=outcome)
        timer, num_samples = self._steps.timer(), 0 if layout is None else layout.num_samples
        masked = None if self.constrained is None or layout is None else self.constrained.of(layout)
        begun = self._begin(plan.page_orders, layout)
        item = InFlight(outcome=outcome, since=since, timer=timer, begun=begun, masked=masked, num_samples=num_samples)
        return item if masked is not None and item.timer is not None else self._with_tokens(item)

    @torch.inference_mode()
    def _begin(self, orders: PageOrders[HostArray], layout: StepLayout[HostArray] | None) -> BegunStep | None:
        """Carries out page orders, then computes logits. Returns None if there is nothing to compute."""
        device = self._on_device
        device.pool_is_zero = False
        inputs: StepInputs[Tensor]
        staged: PageOrders[Tensor] | None
        extras: StepExtras[Tensor] | None
        others = orders or None, None if layout is None else layout.extras
        inputs, (staged, extras) = self._steps.upload(None if layout is None else layout.inputs, others)
        if staged is not None:
            device.carry_out(orders, staged)
        if layout is None or extras is None:
            return None
        edits = inputs.edits if layout.has_static_edits else extras.edits
        if edits is not None:
            device.tables.set_pages(edits)
        static = self._steps.run(layout.shape, inputs)
        device.last_logits = static.logits
        return BegunStep(static=static, samples=inputs.samples, extras=extras.sampling)

    def _answered(self, item: InFlight) -> InFlight:
        """Waits for the masks, and lets the plan compute its tokens. Does not raise."""
        try:
            return self._with_tokens(item)
        except Exception as error:  # every plan must be answered
            answered = self._on_error(item.outcome, error)
        if answered.outcome.status == pb.STEP_STATUS_OUT_OF_MEMORY:
            self._on_device.free_memory()
        return answered

    def _with_tokens(self, item: InFlight) -> InFlight:
        output = None
        if item.begun is not None:
            masks = None if item.masked is None or self.constrained is None else self.constrained.masks(item.masked)
            output = self._steps.finish(item.begun, masks)
        on_end = self._pool.end_step(item.outcome.step)
        outcome = item.outcome
        if item.timer is not None:
            item.timer.end()
        else:
            outcome = replace(outcome, compute_us=int((time.perf_counter() - item.since) * 1e6))
        return replace(item, outcome=outcome, begun=None, output=output, on_end=on_end)

    def _outcome_of(self, item: InFlight) -> Outcome:
        """Waits for the end of the step and returns its outcome. Passes on errors of the device."""
        outcome, output = item.outcome, item.output
        compute_us = outcome.compute_us if item.timer is None else item.timer.wait()
        if item.on_end is not None:
            item.on_end()
        if output is None:
            return replace(outcome, compute_us=compute_us)
        tokens = output.tokens.numpy()[: item.num_samples]
        nonfinite = NO_TOKENS
        if tokens.size and tokens[tokens.argmin()] < 0:
            nonfinite = np.flatnonzero(tokens < 0).astype(np.int32)
            tokens = np.maximum(tokens, 0)
        outcome = Outcome(
            generation=outcome.generation,
            step=outcome.step,
            status=outcome.status,
            tokens=tokens.astype(np.int32),
            nonfinite=nonfinite,
            compute_us=compute_us,
            logprobs=mapped(output.logprobs, _on_host),
            prompt_logprobs=mapped(output.prompt_logprobs, _on_host),
            pool_id=outcome.pool_id,
        )
        self._steps.put_back(output)
        if item.masked is not None and self.constrained is not None:
            outcome = self.constrained.judged(item.masked, outcome)
        return outcome

    def tell_pool(self, pool_id: bytes) -> None:
        """Puts the pool that the worker uses into the outcome of the newest plan."""
        self._items[-1] = replace(self.newest, outcome=replace(self.newest.outcome, pool_id=pool_id))

    def add(self, item: InFlight) -> None:
        """Adds a plan. Requires that every plan before it computes its tokens, or is settled (`choose_tokens`)."""
        self._items.append(item)

    def collect(self, *, wait: bool) -> Outcome | None:
        if not self._items:
            if self.lost:
                raise DeviceLost(f"the device is lost: {self.lost}")
            return None
        return self._items.popleft().outcome if self._settle(0, wait=wait) else None

    def choose_tokens(self) -> None:
        """Waits until the newest plan computes its tokens; the plans before it are settled then."""
        if self._items and self._items[-1].begun is not None:
            for place in range(len(self._items) - 1):
                self._settle(place, wait=True)
            self._items[-1] = self._answered(self._items[-1])

    def _settle(self, place: int, *, wait: bool) -> bool:
        """Returns whether the plan is settled."""
        item, constrained = self._items[place], self.constrained
        masked = item.masked
        try:
            if item.begun is not None:
                # Called again and again, `are_masked` keeps to the limits of time.
                if not (
                    wait or masked is None or constrained is None or constrained.constraints.are_masked(masked.rows)
                ):
                    return False
                item = self._items[place] = self._answered(item)
            if item.timer is not None and not wait and not item.timer.is_over():
                return False
            outcome = self._outcome_of(item)
        except torch.AcceleratorError as error:
            # CUDA reports a kernel's error at a later call, and from then on every call fails.
            self.lost = first_line(error)
            outcomes = on_lost_device([item.outcome for item in self._items], self.lost)
            self._items = deque(InFlight(outcome=outcome) for outcome in outcomes)
            return True
        self._items[place] = InFlight(outcome=outcome)
        return True


def on_lost_device(outcomes: Sequence[Outcome], detail: str) -> list[Outcome]:
    """Returns the outcomes of plans in flight on a device that is lost; `detail` says why.

    The first plan of each generation has failed, and later ones are skipped.
    """
    failed: set[int] = set()
    lost: list[Outcome] = []
    for outcome in outcomes:
        is_first = outcome.generation not in failed
        failed.add(outcome.generation)
        status, why = (pb.STEP_STATUS_FAILED, detail) if is_first else (pb.STEP_STATUS_SKIPPED, "")
        lost.append(replace(outcome, status=status, detail=why))
    return lost


def _on_host(tensor: Tensor) -> NDArray[Any]:
    """A copy, because a later step may overwrite results."""
    return tensor.numpy().copy()
