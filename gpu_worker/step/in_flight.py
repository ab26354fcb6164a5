"""Plans that were submitted and whose outcomes have not been collected, and their outcomes if the device fails."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.step.output import StepOutput
from gpu_worker.wire.frames import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A submitted plan. `output` is None if the plan was refused or computes nothing."""

    outcome: Outcome
    output: StepOutput | None = None
    num_samples: int = 0
    started: "torch.cuda.Event | None" = None
    ended: "torch.cuda.Event | None" = None


def failed_in_order(items: Iterable[InFlight], detail: str) -> list[InFlight]:
    """Outcomes on a lost device, oldest first: the first plan of each generation fails, later ones are skipped."""
    generations: set[int] = set()
    failed: list[InFlight] = []
    for outcome in (item.outcome for item in items):
        is_first = outcome.generation not in generations
        generations.add(outcome.generation)
        status, why = (pb.STEP_STATUS_FAILED, detail) if is_first else (pb.STEP_STATUS_SKIPPED, "")
        failed.append(InFlight(outcome=replace(outcome, status=status, detail=why)))
    return failed
