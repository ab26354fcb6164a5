"""Computes tokens and logprobs from the logits of a step, on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry
from gpu_worker.sampling.dense import EditedLogits, revise
from gpu_worker.sampling.logits import edited
from gpu_worker.sampling.logprobs import LogprobTensors, logprobs_of
from gpu_worker.sampling.sampler import sample
from gpu_worker.sampling.token_history import TokenHistory
from gpu_worker.step.samples import SampleExtras, Samples
from gpu_worker.step.static_step import StaticOutput
from gpu_worker.trees import mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of a step, on the device or on their way to the host."""

    # int64 [samples, padding included]; -1 if a row's logits allow no token.
    tokens: Tensor
    logprobs: LogprobTensors | None = None
    prompt_logprobs: LogprobTensors | None = None

    def to_host(self) -> "StepOutput":
        """Starts copies to pinned memory, which are valid after the CUDA stream has executed them."""
        return mapped(self, _pinned_copy)


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class DeviceSampler:
    """Keeps the token history, the only state of sampling on the device between steps."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._history = TokenHistory(geometry, device)

    def finish(self, static: StaticOutput, samples: Samples[Tensor], extras: SampleExtras[Tensor] | None) -> StepOutput:
        """Chooses the tokens that the static part did not choose, and computes logprobs. Does not wait for the device.

        Requires that the step has samples.
        """
        assert static.logits is not None
        num_samples = samples.rows.shape[0]
        own = static.logits[:num_samples]
        if extras is None:
            return StepOutput(tokens=sample(own, None) if static.tokens is None else static.tokens)
        tokens = self._chosen(own, static.tokens, samples, extras)
        logprobs = prompt_logprobs = None
        if (wanted := extras.with_logprobs) is not None:
            logprobs = logprobs_of(own, tokens.index_select(0, wanted).clamp(min=0), extras.top_k, rows=wanted)
        if extras.prompt is not None:
            prompt_logprobs = logprobs_of(static.logits[num_samples:], extras.prompt.targets, extras.prompt.top_k)
        return StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _chosen(
        self, logits: Tensor, chosen: Tensor | None, samples: Samples[Tensor], extras: SampleExtras[Tensor]
    ) -> Tensor:
        """Returns the tokens of all samples; `chosen` are those of the static part, if it chose some."""
        edits, changed = extras.edits, None
        penalties = None if edits is None else edits.penalties
        if edits is not None:
            if penalties is not None and penalties.missing is not None:
                self._history.write(*penalties.missing)
            changed = EditedLogits(
                samples=edits.samples, draws=edits.draws, logits=edited(logits, edits, self._history)
            )
        if chosen is None:
            tokens = sample(logits, extras.drawing, changed)
        else:
            tokens = chosen
            revise(tokens, logits, samples.drawing, edited=changed, typical_samples=extras.typical)
        if penalties is not None and penalties.sampled is not None:
            places, sampled = penalties.sampled
            self._history.write(places, tokens.index_select(0, sampled).clamp(min=0))
        return tokens
