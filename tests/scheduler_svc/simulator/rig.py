"""Small simulations: a cost model with a given time per step, and setups of few pages."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.simulator.cost import StepShape
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.workload import Arrival, Synthetic, eos_of

VOCAB_SIZE = 1000
PAGE_SIZE = 16
TIMEOUT_SECONDS = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """`fixed` seconds per step and `each` per computed token."""

    fixed: float = 0.010
    each: float = 0.0
    name: str = "flat"

    def seconds(self, step: StepShape) -> float:
        return self.fixed + self.each * step.computed_tokens

    def page_copy_us(self) -> float:
        return 1e6

    def token_us(self) -> float:
        return 1e6 * self.each


def setup(*, cost: Flat | None = None, max_waiting: int = 1024, link_seconds: float = 0.0, **changes: Any) -> Setup:
    """A setup of one worker with few pages; the changes are of its worker and of the setup."""
    cost = cost or Flat()
    of_setup = {name: changes.pop(name) for name in changes.keys() & {each.name for each in fields(Setup)}}
    rows = changes.get("max_rows", 8)
    of_worker: dict[str, Any] = {
        "identity": "simulated", "model": "model", "vocab_size": VOCAB_SIZE, "page_size": PAGE_SIZE, "num_pages": 1001,
        "max_rows": rows, "max_length": 4096, "token_budget": 128, "chunk_align": 16, "logit_rows": rows + 16,
        "eos_token_ids": (eos_of(VOCAB_SIZE),), "pid": 1, "page_copy_us": cost.page_copy_us(),
        "token_us": cost.token_us(),
    }  # fmt: skip
    config = CoreConfig(
        max_waiting=max_waiting, step_timeout_seconds=TIMEOUT_SECONDS, silence_timeout_seconds=TIMEOUT_SECONDS
    )
    info = WorkerInfo(**of_worker | changes)
    return Setup(config=config, info=info, cost=cost, link_seconds=link_seconds, **of_setup)


def arrival(at: float, prompt: int, outputs: int, *, first: int = 0, tenant: int = 0) -> Arrival:
    """Returns a request with a prompt of tokens that count from `first` on."""
    tokens = ((np.arange(prompt) + first) % (VOCAB_SIZE - 1)).astype(np.int32)
    return Arrival(at=at, prompt=tokens, output_tokens=outputs, tenant=tenant)


def arrivals(workload: Synthetic, rate: float = 0.0) -> Iterator[Arrival]:
    return workload.arrivals(rate or workload.own_rate, VOCAB_SIZE)


def simulated(made: Setup, coming: Iterator[Arrival], *, concurrency: int = 0, tenants: int = 1) -> Simulation:
    """Runs a simulation to its end."""
    simulation = Simulation(made, coming, Tally(tenants=tenants), concurrency=concurrency)
    assert simulation.run()
    return simulation
