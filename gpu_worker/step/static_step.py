"""The part of a step that its shape and its inputs determine: masks, model, tokens of the samples that are not special.

In a padded step it is the same operators on the same memory whenever the shape is the same, so it can be captured once
and replayed. Nothing here waits for the device or reads a value of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.attention.paged import StepContext
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.sampling.choice import greedy_tokens
from gpu_worker.sampling.sampler import choose
from gpu_worker.sampling.shared_tokens import ShareTokens, keep_tokens
from gpu_worker.step.device_tables import DeviceTables
from gpu_worker.step.kernels import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOutput:
    """The results of the static part; a replay overwrites them."""

    # [samples + prompt tokens, vocabulary]; None if the step has no samples.
    logits: Tensor | None
    # int64 [samples]; -1 if a row's logits allow no token. On a CPU the greedy ones of steps of decode rows alone; None
    # for other steps there: their tokens are chosen afterwards.
    tokens: Tensor | None


class StaticStep:
    """The static part of steps of one model."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels, tables: DeviceTables, *, is_padded: bool) -> None:
        self._model, self._kernels, self._tables, self._is_padded = model, kernels, tables, is_padded
        self.share_tokens: ShareTokens = keep_tokens

    def __call__(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        """Requires that the page tables are those of the step."""
        context = self._kernels.update_masks(inputs)
        ids, samples, newest = inputs.token_ids, inputs.samples, self._tables.newest_token
        if inputs.decode is not None:
            rows = inputs.decode.rows
            own = ids[: rows.shape[0]]
            known = torch.where(own < 0, newest.index_select(0, rows), own)
            if rows.shape == ids.shape:
                ids = known
            else:
                own.copy_(known)
        logits = self._forward(ids, inputs.positions, None if _samples_every_token(inputs) else samples.kept, context)
        if logits is None or not (self._is_padded or inputs.prefill is None):
            return StaticOutput(logits=logits, tokens=None)
        own = logits[: samples.rows.shape[0]]
        if not self._is_padded:
            return StaticOutput(logits=logits, tokens=greedy_tokens(own))
        tokens = choose(own, samples.drawing)
        self.share_tokens(tokens)
        newest.index_copy_(0, samples.rows, tokens.clamp(min=0))
        return StaticOutput(logits=logits, tokens=tokens)

    def _forward(self, ids: Tensor, positions: Tensor, kept: Tensor | None, context: StepContext) -> Tensor | None:
        """Returns logits [kept, vocabulary] of the packed tokens `kept` (None: of all), or None if `kept` is empty."""
        arguments = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "step": context,
        }
        if kept is None:
            return self._model(**arguments).logits[0]
        if kept.numel() == 0:
            self._model.base_model(**arguments)
            return None
        return self._model(**arguments, logits_to_keep=kept).logits[0]


def _samples_every_token(inputs: StepInputs[Tensor]) -> bool:
    """Whether the samples are the packed tokens in their order, padding aside, as in every step of decode rows alone.

    Taking them by an index would cost as much as a small layer there.
    """
    return inputs.prefill is None and inputs.samples.kept.shape == inputs.token_ids.shape
