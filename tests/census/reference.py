"""The reference: Hugging Face's own eager forward of a whole sequence, which uses no code of the worker.

Rotary tables that depend on the longest text are forced by a companion in the batch, another sequence that ends at the
longest position; eager attention never mixes sequences.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
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


# Errors of one rounding are drawn so often; a choice that a near tie decides changes in about half of them.
_DRAWS = 16


class Reference:
    """An eager model in the dtype that is served, and the same weights in float64, or float32 if its code says so."""

    def __init__(self, model: PreTrainedModel, *, max_length: int) -> None:
        self._eager, self._max_length = model, max_length
        self._wide: PreTrainedModel | None = copy.deepcopy(model).double()
        self._wide_is_float64 = True

    def truth(self, tokens: list[int]) -> tuple[Truth, float]:
        """The exact values, and the relative error of eager attention; 0 if no wider dtype is available."""
        eager, exact = self._run(self._eager, tokens), self._exact(tokens)
        if exact is None:
            return eager, 0.0
        return exact, max(relative_error(eager.hidden, exact.hidden), relative_error(eager.logits, exact.logits))

    def sensitivity(self, tokens: list[int], exact: Truth) -> Truth:
        """The largest relative errors of eager attention by position [n], if every linear layer errs by one rounding.

        Where a near tie decides which experts compute a token, rounding changes that token by as much as
        another choice of experts does, on every path.
        """
        generator = torch.Generator().manual_seed(7)
        found: list[tuple[Tensor, Tensor]] = []
        for _ in range(_DRAWS):
            with _shaken(self._eager, generator):
                eager = self._run(self._eager, tokens)
            found.append(
                (errors_by_position(eager.hidden, exact.hidden), errors_by_position(eager.logits, exact.logits))
            )
        hidden, logits = (torch.stack(each).amax(0) for each in zip(*found, strict=True))
        return Truth(hidden=hidden, logits=logits)

    def _exact(self, tokens: list[int]) -> Truth | None:
        if self._wide is not None and self._wide_is_float64:
            try:
                with Float64Kept():
                    return self._run(self._wide, tokens)
            except (RuntimeError, TypeError, AssertionError):
                # Some code names float32 itself.
                self._wide_is_float64 = False
                self._wide = None if self._eager.dtype is torch.float32 else copy.deepcopy(self._eager).float()
        return None if self._wide is None else self._run(self._wide, tokens)

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


def errors_by_position(ours: Tensor, exact: Tensor) -> Tensor:
    """Returns the norm of each difference relative to that of the exact values: [n], for two [n, size]."""
    return (ours - exact).norm(dim=-1) / exact.norm(dim=-1)


@contextmanager
def _shaken(model: PreTrainedModel, generator: torch.Generator) -> Iterator[None]:
    """Adds an error of at most one rounding to every output of a linear layer for the duration."""

    def shake(module: nn.Module, args: object, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator).sub_(0.5).mul_(torch.finfo(output.dtype).eps)
        return (output * (1 + noise.to(output.device))).to(output.dtype)

    hooks = [module.register_forward_hook(shake) for module in model.modules() if isinstance(module, nn.Linear)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
