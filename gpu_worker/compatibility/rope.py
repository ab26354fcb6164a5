"""Pins rotary tables that Transformers otherwise chooses in each forward, by the largest position of the whole batch.

`longrope` has one table for short texts and one for long ones, `dynamic` one for each length. In a batch of several
sequences the longest would determine the table of all, and cached keys would have been rotated by another table. `pin`
lets a module choose once, for the longest text that this worker serves, and keep that table. Knows nothing of attention
or pages.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import modeling_rope_utils

_DECORATED_IN = modeling_rope_utils.__file__


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
