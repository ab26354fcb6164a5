"""From a step's logits to its tokens and logprobs, on the device, in stream order.

Owns the order of things: histories, changed logits, tokens, logprobs. Knows nothing of attention, pages or sockets.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry
from gpu_worker.sampling.logits import edited
from gpu_worker.sampling.logprobs import LogprobTensors, logprobs_of, pinned_copy
from gpu_worker.sampling.sampler import EditedLogits, sample
from gpu_worker.sampling.token_history import TokenHistory
from gpu_worker.step.row_tables import RowTables
from gpu_worker.step.samples import SamplePart
from gpu_worker.step.sampling_upload import drawing_of, edits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step tells, on the device or on its way to the host."""

    # int64 [samples, padding included]; -1 where a row's logits allow no token.
    tokens: Tensor
    logprobs: LogprobTensors | None = None
    prompt_logprobs: LogprobTensors | None = None

    def to_host(self) -> "StepOutput":
        """The same in pinned memory, there once the stream has got so far."""
        return StepOutput(
            tokens=pinned_copy(self.tokens),
            logprobs=None if self.logprobs is None else self.logprobs.to_host(),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.to_host(),
        )


class Sampling:
    """Sole owner of what sampling keeps on the device from step to step."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._history = TokenHistory(geometry, device)

    def run(self, logits: Tensor, samples: SamplePart, staged: Mapping[str, Tensor], tables: RowTables) -> StepOutput:
        """`logits` of the samples, padding included, and then of prompt tokens; never waits for the device."""
        num_samples = samples.rows.size
        own = logits[:num_samples]
        changed = None
        if samples.edits is not None:
            if "history_places" in samples.edits.arrays:
                self._history.write(staged["history_places"], staged["history_tokens"])
            edits = edits_of(samples.edits, staged)
            changed = EditedLogits(samples=edits.samples, draws=edits.draws, logits=edited(own, edits, self._history))
        tokens = sample(own, drawing_of(samples, staged, tables), changed)
        logprobs = prompt_logprobs = None
        if samples.edits is not None and "remembered" in samples.edits.arrays:
            self._history.write(staged["remembered_places"], tokens.index_select(0, staged["remembered"]).clamp(min=0))
        if samples.told.size:
            told = staged["told"]
            logprobs = logprobs_of(own, tokens.index_select(0, told).clamp(min=0), samples.top_k, rows=told)
        if samples.prompt is not None:
            prompt_logprobs = logprobs_of(logits[num_samples:], staged["prompt_targets"], samples.prompt.top_k)
        return StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
