"""What a model asks of attention, overheard on a twin without weights: every call, every mask.

Owns the implementation name under which a model's calls are recorded instead of computed. Knows nothing of what is
served. Transformers' masks are functions of logical positions; `Heard` keeps the function itself, since keywords such
as `sliding_window` say only what some kernels are told.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

# Without masks, as the worker runs a model; and with masks, as its own eager attention would get them.
CALLS_NAME, MASKS_NAME = "tandem_calls", "tandem_masks"

# Stands for the step that the worker hands through a model to its attention.
STEP = object()

# bool (batch, head, query position, key position), each an index tensor.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the attention interface."""

    module: nn.Module
    # [1, heads, tokens, dimension] each.
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    # The mask as it came; the tensor is no more than a name for a function in `Heard.masks`.
    mask: Tensor | None
    keywords: dict[str, Any]


@dataclass(slots=True)
class Heard:
    """What one forward asked for, in order."""

    calls: list[Call] = field(default_factory=list)
    # Lines of the model's code that number the tokens of a batch, or run a convolution.
    numberings: list[str] = field(default_factory=list)
    convolutions: list[str] = field(default_factory=list)
    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def mask_function(self, mask: Tensor) -> MaskFunction | None:
        """What the model asked for when it got `mask`; None where the model changed it, or made its own."""
        return next((function for tensor, function in self.masks if tensor is mask), None)


_heard: ContextVar[Heard] = ContextVar("heard")


def _record_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    call = Call(
        module=module,
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        mask=attention_mask,
        keywords=keywords,
    )
    _heard.get().calls.append(call)
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]), None


def _record_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor:
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    _heard.get().masks.append((mask, mask_function))
    return mask


class _Watch(TorchDispatchMode):
    """Sees what a model does to the order of a batch. Grouped experts number tokens too, and undo it."""

    def __init__(self, heard: Heard, num_tokens: int) -> None:
        super().__init__()
        self._heard, self._num_tokens = heard, num_tokens

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.arange") and out.shape == (self._num_tokens,):
            self._note(self._heard.numberings)
        elif name.startswith(("aten.conv", "aten.convolution")):
            self._note(self._heard.convolutions)
        return out

    def _note(self, lines: list[str]) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/transformers/" in frame.filename]
        if frames and "modeling_" in frames[-1].filename:
            lines.append(place_of(frames[-1]))


def place_of(frame: traceback.FrameSummary) -> str:
    """A line of code, for people."""
    return f"{frame.filename.rsplit('/', 1)[-1]}, line {frame.lineno}: {frame.line}"


@contextmanager
def _listening(model: PreTrainedModel, name: str) -> Iterator[Heard]:
    AttentionInterface.register(CALLS_NAME, _record_call)
    AttentionInterface.register(MASKS_NAME, _record_call)
    AttentionMaskInterface.register(MASKS_NAME, _record_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    heard = Heard()
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)
        model.set_attn_implementation(before)


@torch.inference_mode()
def calls_without_masks(twin: PreTrainedModel, num_tokens: int) -> tuple[Heard, tuple[int, ...]]:
    """What the twin asks for in a step of the worker, and the shape of its logits where one token's are wanted.

    Raises whatever the model raises.
    """
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    arguments = {"input_ids": ids, "position_ids": ids.clone(), "logits_to_keep": ids[0, :1], "step": STEP}
    with _listening(twin, CALLS_NAME) as heard, _Watch(heard, num_tokens):
        out = twin(**arguments, use_cache=False)
    return heard, tuple(out.logits.shape)


@torch.inference_mode()
def calls_with_masks(twin: PreTrainedModel, num_tokens: int) -> Heard:
    """What the twin asks for with the masks of one whole sequence. Raises whatever the model raises."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    # Given a mask of padding, Transformers does not look for several sequences in the positions, which a twin without
    # data cannot tell.
    everything = torch.ones(1, num_tokens, dtype=torch.int64, device="meta")
    with _listening(twin, MASKS_NAME) as heard:
        twin(input_ids=ids, attention_mask=everything, position_ids=ids.clone(), use_cache=False)
    return heard
