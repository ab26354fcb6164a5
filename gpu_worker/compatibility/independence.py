"""Makes the rows of a packed step independent, and tests it with the real weights before serving.

In the test attention is replaced by a local one, in which a token attends only to itself; information that still passes
between tokens would pass between requests. The test finds convolutions, state spaces and token shifts; positions taken
from the order of the batch instead of `position_ids`; tables and capacities that depend on the batch; and models that
do not number the tokens of a text 0, 1, 2.

Transformers chooses some rotary tables in each forward, by the largest position of the whole batch: `longrope` has one
table for short texts and one for long ones, `dynamic` one for each length. In a batch of several sequences the longest
would determine the table of all, and cached keys would have been rotated by another table. `pin` lets a module choose
once, for the longest text that this worker serves, and keep that table. Knows nothing of pages.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, modeling_rope_utils

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.compatibility.probe import attending

_LOCAL_NAME = "tandem_local"
_NUM_TOKENS = 24
# Relative error of a token's hidden state that rounding in another order may cause.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Share of tokens that must agree. In another order a router's near tie may be rounded the other way for a few tokens.
_AGREEING = 0.75
_DECORATED_IN = modeling_rope_utils.__file__


def check_independence(model: PreTrainedModel, max_length: int) -> None:
    """Raises ModelRefused, which names the dependence between tokens. Leaves the model unchanged."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (_NUM_TOKENS,), generator=generator)
    # Near and far positions: tables that depend on the batch differ in either.
    spread = torch.logspace(0, 1, _NUM_TOKENS, base=max(max_length - 1, 2), dtype=torch.float64).long()
    positions = spread.clamp(max=max_length - 1)[torch.randperm(_NUM_TOKENS, generator=generator)]
    order = torch.randperm(_NUM_TOKENS, generator=generator)
    half = _NUM_TOKENS // 2
    near = torch.arange(_NUM_TOKENS).remainder(max_length)
    other_ids = ids.clone()
    other_ids[half:] = ids[half:].flip(0)
    far = near.clone()
    far[half:] = max_length - 1

    def hidden(tokens: Tensor, at: Tensor | None) -> Tensor:
        """Last hidden states [tokens, hidden] of one packed step; without positions the model numbers the tokens."""
        places = None if at is None else at[None].to(model.device)
        return model.base_model(input_ids=tokens[None].to(model.device), position_ids=places, use_cache=False)[0][0]

    compare = functools.partial(_compare, _TOLERANCE.get(model.dtype, 1e-3))
    AttentionInterface.register(_LOCAL_NAME, _attend_to_itself)
    with torch.inference_mode(), attending(model, _LOCAL_NAME):
        compare(
            hidden(ids, positions)[order],
            hidden(ids[order], positions[order]),
            "tokens interact outside attention, or positions are numbered by their order in the batch: reordering it "
            "changes its results",
        )
        compare(
            hidden(ids, near)[:half],
            hidden(other_ids, far)[:half],
            "results depend on the rest of the batch: other tokens and positions in the batch change a token's result",
        )
        alone = ids[:max_length]
        compare(
            hidden(alone, None),
            hidden(alone, torch.arange(alone.shape[0])),
            "positions do not count from 0: without position_ids the model numbers a text's tokens differently",
        )


def _compare(tolerance: float, one: Tensor, other: Tensor, problem: str) -> None:
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    error = (one - other).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-30)
    agreeing = float((error <= tolerance).double().mean())
    if agreeing < _AGREEING:
        raise ModelRefused(f"{problem} ({agreeing:.0%} of tokens agree, median error {float(error.median()):.2g})")


def _attend_to_itself(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """The token's own value, weighted by its query and key, which its position has rotated."""
    group = query.shape[1] // key.shape[1]
    share = 1 + (_turn(query) + _turn(key.repeat_interleave(group, 1))) / 2
    return (value.repeat_interleave(group, 1) * share).transpose(1, 2).contiguous(), None


def _turn(x: Tensor) -> Tensor:
    """The component of x along a fixed direction, in [-1, 1]; a rotation of x changes it."""
    direction = torch.linspace(0, 9, x.shape[-1], device=x.device, dtype=torch.float32).cos()
    direction = (direction / direction.norm()).to(x.dtype)
    return nn.functional.normalize(x, dim=-1).matmul(direction)[..., None]


def undecorated_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of `module` without the choice of a table. Returns None if the module makes no such choice."""
    forward = type(module).forward
    while hasattr(forward, "__wrapped__"):
        if getattr(forward, "__code__", None) is not None and forward.__code__.co_filename == _DECORATED_IN:
            return inspect.unwrap(forward)
        forward = forward.__wrapped__
    return None


def undecorate(module: nn.Module) -> None:
    """Keeps the module's present table from now on."""
    plain = undecorated_forward(module)
    if plain is not None:
        module.forward = functools.partial(plain, module)


@torch.inference_mode()
def pin(model: nn.Module, max_length: int) -> list[str]:
    """Pins the table for `max_length` tokens in every rotary module. Returns the rope types that this affects."""
    chosen: set[str] = set()
    for module in model.modules():
        if undecorated_forward(module) is None:
            continue
        rope_type = getattr(module, "rope_type", None)
        types: dict[str | None, Any] = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        buffer = next(module.buffers())
        last = torch.full((1, 1), max_length - 1, dtype=torch.int64, device=buffer.device)
        for layer_type, name in types.items():
            if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
                type(module).forward(module, buffer.new_zeros(1), last, *([layer_type] if layer_type else []))
                chosen.add(name)
        undecorate(module)
    return sorted(chosen)
