"""The Runner executes plans in order. Only it changes the row tables and the device's memory.

A plan passes through wire/ (bytes to checked numbers), layout/ (row tables, checksum, arrays) and a `StepBackend`.
`submit` enqueues it, so that two plans can be in flight, or computes it, as the backend does. `collect` returns
outcomes in the order of the plans.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.arrays import HostArray
from gpu_worker.constraints.constraints import Constraints
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.step_layout import StepLayout, lay_out
from gpu_worker.shared_pool.messages import PageDamaged, PoolError
from gpu_worker.shared_pool.pool import PrivatePool, WorkerPool
from gpu_worker.step.backend import StepBackend
from gpu_worker.step.device_model import DeviceModel
from gpu_worker.step.in_flight import Execution, InFlight
from gpu_worker.step.page_labels import PageLabels
from gpu_worker.step.refusals import OutOfSync, refusal_of
from gpu_worker.wire.frames import Outcome, Plan, PlanError, WeightsLoader, read_plan
from gpu_worker.wire.page_orders import note_saves


class Runner:
    """Executes plans with one model on one device."""

    def __init__(self, on_device: DeviceModel, steps: StepBackend, *, pool: WorkerPool | None = None) -> None:
        """pool: the memory of the KV pool; by default it ends with the process."""
        geometry = on_device.geometry
        self.on_device, self.steps, self.geometry, self.device = on_device, steps, geometry, on_device.device
        self.tables, self.labels = RowTables(geometry), PageLabels(geometry)
        self.pool = pool or PrivatePool()
        self.pool.attach(self.on_device.cache.pools, geometry.page_size)
        self.execution = Execution(on_device, steps, self.pool, on_error=self._answer)
        self._generation, self._step, self._failed = 0, 0, False
        # Host pages to which a plan of this session has saved a page.
        self._is_saved = np.zeros(geometry.host_pages, np.bool_)
        self.weights: WeightsLoader | None = None
        # The answer to a plan after its step raised an exception.
        self.refusal_of = refusal_of

    @property
    def num_in_flight(self) -> int:
        """Submitted plans without a collected outcome."""
        return len(self.execution)

    @property
    def constraints(self) -> Constraints | None:
        """The constraints that rows may have; None if they may have none."""
        constrained = self.execution.constrained
        return None if constrained is None else constrained.constraints

    def report_pages(self, join: pb.Join) -> None:
        """Writes into a Join which pool the worker has now, and what its pages hold."""
        join.pool_id = self.pool.pool_id
        self.labels.report(join, self._generation)

    def join(self, message: pb.Joined) -> None:
        """Begins a session with a scheduler. If it keeps no page, it expects no NaN in the pool, which becomes zero."""
        self.reset(message.generation)
        if self.constraints is not None:
            self.constraints.begin_session()
        self._is_saved[:] = False
        self.labels.begin_session(message)
        if not message.keeps_pages:
            self.on_device.zero_pool()

    def reset(self, generation: int) -> None:
        """Begins a generation: removes every row. The next plan must be step 1."""
        self._generation, self._step, self._failed = generation, 0, False
        self.tables.reset()
        if self.constraints is not None:
            self.constraints.forget_rows()
        self.pool.begin_generation(generation)

    def submit(self, message: pb.StepPlan) -> None:
        """Enqueues one plan. Does not raise: an error becomes the plan's outcome."""
        self.execution.choose_tokens()
        self._submit(message)
        if message.HasField("take_over"):
            self.execution.tell_pool(self.pool.pool_id)

    def _submit(self, message: pb.StepPlan) -> None:
        if message.generation > self._generation:
            self.reset(message.generation)
        if self._failed or message.generation < self._generation:
            self.execution.add(self._refused(message, pb.STEP_STATUS_SKIPPED, ""))
            return
        begun = time.perf_counter()
        try:
            if message.step != self._step + 1:
                raise OutOfSync(f"step {message.step} follows step {self._step}")
            self._step = message.step
            if message.HasField("take_over"):
                self.labels.forget()
                self.pool.take_over(message.take_over)
                self.on_device.pool_is_zero = False
            plan = read_plan(message, self.geometry)
            self.labels.follow(message.labels, plan)
            layout = self._apply(plan)
            if self.tables.checksum != plan.checksum:
                checksum = self.tables.checksum
                raise OutOfSync(f"row tables differ: checksum {checksum:#x}, the plan's {plan.checksum:#x}")
            self.execution.add(self.execution.run(plan, layout, begun))
        except Exception as error:  # every plan must be answered
            self.execution.add(self._answer(message, error))
        if self.execution.newest.outcome.status == pb.STEP_STATUS_OUT_OF_MEMORY:
            self.on_device.free_memory()

    def _answer(self, message: "pb.StepPlan | Outcome", error: Exception) -> InFlight:
        status, detail = self.refusal_of(error, message.step)
        if isinstance(error, torch.AcceleratorError) and status != pb.STEP_STATUS_OUT_OF_MEMORY:
            self.execution.lost = detail
        refused = self._refused(message, status, detail, damaged_pages=int(isinstance(error, PageDamaged)))
        if isinstance(error, PoolError):
            # The scheduler gives all pages up, and expects no NaN in them.
            self.labels.forget()
            self.on_device.zero_pool()
        return refused

    def _refused(
        self, message: "pb.StepPlan | Outcome", status: "pb.StepStatus.ValueType", detail: str, damaged_pages: int = 0
    ) -> InFlight:
        if message.generation == self._generation:
            self._failed = True
        outcome = Outcome(generation=message.generation, step=message.step, status=status, detail=detail)
        return InFlight(outcome=replace(outcome, damaged_pages=damaged_pages))

    def _apply(self, plan: Plan) -> StepLayout[HostArray] | None:
        """Applies the plan to the tables and lays it out. Returns None if the plan computes nothing."""
        if plan.page_orders:
            note_saves(plan.page_orders, self._is_saved)
        edits = self.tables.apply(plan)
        layout = None
        if plan.chunk_rows.size or plan.decode_rows.size:
            self.tables.check(plan)
            layout = lay_out(plan, edits, self.tables, self.steps.views, self.steps.inputs_of)
        elif edits.size:
            raise PlanError("the plan starts rows or appends pages but computes nothing")
        self.pool.begin_step(plan, self.tables)
        self.tables.advance(plan)
        return layout

    def collect(self, *, wait: bool = True) -> Outcome | None:
        """Returns the oldest plan's outcome, or None if no plan is in flight, or if it still runs and `wait` is False.

        Raises DeviceLost if the device has failed and every outcome was collected.
        """
        outcome = self.execution.collect(wait=wait)
        if self.execution.lost:
            self._failed = True
        return outcome

    def warm_up(self, on_kernel: Callable[[str, float], object] = lambda *_: None) -> None:
        """Compiles every kernel, captures steps, and calls `on_kernel` (name, seconds) after each.

        Any later compilation of a kernel raises.
        """
        for name, run in self.steps.warm_up_steps(self.rehearse):
            begun = time.perf_counter()
            run()
            on_kernel(name, time.perf_counter() - begun)
        self.reset(0)
        self.on_device.zero_pages(np.ones(1, np.int64))
        self.on_device.pool_is_zero = True
        self.on_device.may_compile = False

    def rehearse(self, *plans: Plan, after_each: Callable[[], None] | None = None) -> list[Outcome]:
        """Runs test plans before serving and resets the runner. Unlike `submit`, it raises the errors of the plans.

        Calls `after_each` when a plan has ended. At the end it zeroes page 0, which padding writes, and the pages of
        started rows; so plans must not append pages.
        """
        self.reset(0)
        was_zero = self.on_device.pool_is_zero
        outcomes: list[Outcome] = []
        for plan in plans:
            self.execution.add(self.execution.run(plan, self._apply(plan), time.perf_counter()))
            while (outcome := self.collect()) is not None:
                outcomes.append(outcome)
            if after_each is not None:
                after_each()
        self.reset(0)
        used = [pages for plan in plans if plan.started for pages in plan.started.pages]
        self.on_device.zero_pages(np.unique(np.concatenate([np.zeros(1, np.int64), *used])))
        self.on_device.pool_is_zero = was_zero
        return outcomes
