"""The constrained rows of plans: they start, get masks before they sample, and are judged by their tokens.

Owns the connection between plans and the worker's constraints (`constraints/`), and the memory for uploads of masks: on
a GPU pinned buffers, one more than plans in flight, so that a copy waits for nothing; a buffer is reused when its copy
has ended. On a CPU the tensor shares the memory of the masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.arrays import HostArray, Int64Array
from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.rows import ConstrainedRow, Fate
from gpu_worker.layout.step_layout import StepLayout
from gpu_worker.step.staging import NUM_BUFFERS
from gpu_worker.wire.frames import Outcome
from gpu_worker.wire.started import StartedRows


class MaskUpload:
    """The masks of one step after another."""

    def __init__(self, device: torch.device, *, max_rows: int, mask_words: int) -> None:
        """mask_words: int32 words of a row's mask."""
        self._device = device
        self._next = 0
        on_gpu = device.type == "cuda"
        num = NUM_BUFFERS if on_gpu else 1
        shape = (max_rows, mask_words)
        self._hosts = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(num)]
        self._events: list[torch.cuda.Event | None] = [None] * num
        self._on_device = torch.zeros(shape, dtype=torch.int32, device=device) if on_gpu else None

    def upload(self, num_rows: int, write: Callable[[NDArray[np.int32]], None]) -> Tensor:
        """Returns the masks of `num_rows` rows as uint8 [rows, bytes], valid until the next call.

        write: writes int32 [rows, words].
        """
        host = self._hosts[self._next][:num_rows]
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        write(host.numpy())
        if self._on_device is None:
            return host.view(torch.uint8)
        masks = self._on_device[:num_rows]
        masks.copy_(host, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._hosts)
        return masks.view(torch.uint8)


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
        return self._upload.upload(len(masked.rows), lambda into: self.constraints.masks(masked.rows, into))

    def judged(self, masked: MaskedSamples, outcome: Outcome) -> Outcome:
        """The outcome with what the step's tokens mean for the constraints."""
        tokens = outcome.tokens[masked.samples]
        tokens[np.isin(masked.samples, outcome.nonfinite)] = -1
        self.constraints.learn(zip(masked.rows, tokens.tolist(), strict=True))
        fates = [own.fate for own in masked.rows]
        details = [own.detail for own in masked.rows if own.fate is Fate.FAILED]
        return replace(
            outcome,
            constraint_complete=_samples(masked, [fate is Fate.COMPLETE for fate in fates]),
            constraint_failed=_samples(masked, [fate is Fate.FAILED for fate in fates]),
            constraint_detail=details[0] if details else "",
        )


def _samples(masked: MaskedSamples, are_meant: Sequence[bool]) -> HostArray:
    return masked.samples[np.array(are_meant, np.bool_)].astype(np.int32)
