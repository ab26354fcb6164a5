"""Finds linear layers that receive the same tensor, so that one product can compute them together.

Owns the search: a step on the meta model, in which each nn.Linear notes its input. Knows nothing of how layers are
merged.
"""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gpu_worker.checkpoint.linear import Groups
from gpu_worker.compatibility.check_model import in_bfloat16
from gpu_worker.compatibility.probe import calls_without_masks

_NUM_TOKENS = 5


def shared_inputs(meta_model: PreTrainedModel) -> Groups:
    """Names of linear layers in groups of two or more, in the order of their calls.

    The layers of a group are children of one module, are called once each in a step, and receive the same tensor. All
    have a bias, or none has.
    """
    places = {
        module: (name.rpartition(".")[0], name)
        for name, module in meta_model.named_modules()
        if type(module) is nn.Linear
    }
    used_twice = _used_twice(meta_model)
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))

    hooks = [module.register_forward_pre_hook(note) for module in places]
    try:
        with in_bfloat16(meta_model):
            calls_without_masks(meta_model, _NUM_TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    called = Counter(module for module, _ in calls)
    groups: dict[object, list[str]] = {}
    for module, given in calls:
        if called[module] == 1 and id(module.weight) not in used_twice:
            parent, name = places[module]
            # The noted tensors are alive, so their ids differ.
            groups.setdefault((parent, id(given), module.bias is None), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _used_twice(model: nn.Module) -> set[int]:
    """Ids of parameters that several modules have."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice
