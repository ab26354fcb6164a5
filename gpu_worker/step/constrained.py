"""The constrained rows of plans: they start, get masks before they sample, and are judged by their tokens.

Owns the connection between plans and the worker's constraints (`constraints/`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from gpu_worker.arrays import HostArray, Int64Array
from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.rows import ConstrainedRow, Fate
from gpu_worker.layout.step_layout import StepLayout
from gpu_worker.step.backend import MaskUpload
from gpu_worker.wire.frames import Outcome
from gpu_worker.wire.started import StartedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples:
    """The samples of a step with constraints, in order."""

    # int64 [n]: indices into the samples.
    samples: Int64Array
    rows: Sequence[ConstrainedRow]


class ConstrainedSteps:
    """The steps of one runner."""

    def __init__(self, constraints: Constraints, upload: MaskUpload) -> None:
        self.constraints, self._upload = constraints, upload

    def start(self, started: StartedRows) -> None:
        """Starts the rows. Masks are asked for, unless the scheduler waits for the answer: then no row samples yet."""
        hashes = started.constraints or [b""] * started.rows.size
        starts = zip(started.rows.tolist(), hashes, started.tokens, started.num_prompt_tokens.tolist(), strict=True)
        for row, hash_, tokens, num_prompt in starts:
            self.constraints.start(row, hash_, tokens[num_prompt:])

    def of(self, layout: StepLayout[HostArray]) -> MaskedSamples | None:
        """The constrained samples of a step; None if it has none."""
        sampling = layout.extras.sampling
        edits = None if sampling is None else sampling.edits
        if edits is None or edits.masked is None:
            return None
        samples = edits.samples[edits.masked]
        rows = [self.constraints.row(row) for row in layout.inputs.samples.rows[samples].tolist()]
        return MaskedSamples(samples=samples, rows=rows)

    def masks(self, masked: MaskedSamples) -> Tensor:
        """Waits for the masks and returns them on the device, as `sampling/logits.py` takes them."""
        return self._upload(len(masked.rows), lambda into: self.constraints.masks(masked.rows, into))

    def judged(self, masked: MaskedSamples, outcome: Outcome) -> Outcome:
        """The outcome with what the step's tokens mean for the constraints."""
        tokens = outcome.tokens[masked.samples]
        tokens[np.isin(masked.samples, outcome.nonfinite)] = -1
        self.constraints.learn(zip(masked.rows, tokens.tolist(), strict=True))
        fates = [row.fate for row in masked.rows]
        details = [row.detail for row in masked.rows if row.fate is Fate.FAILED]
        return replace(
            outcome,
            constraint_complete=_samples(masked, [fate is Fate.COMPLETE for fate in fates]),
            constraint_failed=_samples(masked, [fate is Fate.FAILED for fate in fates]),
            constraint_detail=details[0] if details else "",
        )


def _samples(masked: MaskedSamples, are_meant: Sequence[bool]) -> HostArray:
    return masked.samples[np.array(are_meant, np.bool_)].astype(np.int32)
