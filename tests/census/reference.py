"""The reference: Hugging Face's own eager forward of a whole sequence, which uses no code of the worker.

Rotary tables that depend on the longest text are forced by a companion in the batch, another sequence that ends at the
longest position; eager attention never mixes sequences.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.gpu_worker.reference import Float64Kept


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part that returns the last hidden states first."""
    for part in (model.get_decoder(), getattr(model, "model", None), model.base_model):
        if isinstance(part, PreTrainedModel) and part is not model:
            return part
    raise AssertionError(f"{type(model).__name__} shows no decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The exact values of one sequence, in float64 on the CPU."""

    # [n, hidden] and [n, vocabulary].
    hidden: Tensor
    logits: Tensor


class Reference:
    """An eager model in the dtype that is served, and the same weights in float64 if its code allows it."""

    def __init__(self, model: PreTrainedModel, *, max_length: int) -> None:
        self._eager, self._max_length = model, max_length
        self._wide: PreTrainedModel | None = copy.deepcopy(model).double()

    def truth(self, tokens: list[int]) -> tuple[Truth, float]:
        """The exact values, and the relative error of eager attention; 0 if float64 is not available."""
        eager = self._run(self._eager, tokens)
        if self._wide is not None:
            try:
                with Float64Kept():
                    exact = self._run(self._wide, tokens)
                noise = max(relative_error(eager.hidden, exact.hidden), relative_error(eager.logits, exact.logits))
                return exact, noise
            except (RuntimeError, TypeError, AssertionError):
                # Some code names float32 itself.
                self._wide = None
        return eager, 0.0

    @torch.inference_mode()
    def _run(self, model: PreTrainedModel, tokens: list[int]) -> Truth:
        positions = torch.arange(len(tokens))
        companion = positions + self._max_length - len(tokens)
        ids = torch.tensor([tokens, tokens], device=model.device)
        at = torch.stack([positions, companion]).to(model.device)
        seen: list[Tensor] = []
        hook = decoder_of(model).register_forward_hook(lambda module, args, output: seen.append(output[0]))
        logits = model(input_ids=ids, position_ids=at, use_cache=False).logits
        hook.remove()
        return Truth(hidden=seen[0][0].double().cpu(), logits=logits[0].double().cpu())


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, relative to that of the exact values."""
    return float((ours - exact).norm() / exact.norm())
