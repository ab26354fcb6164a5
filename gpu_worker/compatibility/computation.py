"""A hash of what a model computes with given weights, from its meta model.

It covers every operator, with its numbers and the tensors that it joins, of a step and of the model's own eager
attention, which the self-check reads; the attention layers; the names and shapes of weights; the tables that the model
makes itself; and the lengths that it is served with. So a field of config.json changes the hash if and only if it
changes what is computed or checked, without a list of fields. Which weights are tied is left out: tied ones are weights
with equal values. Knows nothing of files.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from gpu_worker.attention.layers import LayerMap
from gpu_worker.compatibility.check_model import default_length, in_bfloat16, length_limit, run_eagerly
from gpu_worker.compatibility.probe import calls_without_masks
from gpu_worker.compatibility.rope import pin

_NUM_TOKENS = 13
# A constant of a model's code; larger tensors are weights or tables.
_MOST_VALUES = 4096


def computation_of(meta_model: PreTrainedModel, layers: LayerMap) -> str:
    """The hash. Leaves the meta model's tables with data, on the CPU. Raises ModelRefused."""
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(f"{values!r}\0".encode())

    lengths = default_length(meta_model.config), length_limit(meta_model.config)
    add(type(meta_model).__name__, lengths, layers)
    for name, tensor in meta_model.state_dict(keep_vars=True).items():
        add(name, tuple(tensor.shape))
    with in_bfloat16(meta_model), _Operators(add):
        calls_without_masks(meta_model, _NUM_TOKENS)
        run_eagerly(meta_model)
    _make_tables(meta_model)
    # Some tables depend on the longest text; a model that was pinned for any length has one of these.
    for length in (2, *lengths):
        pin(meta_model, length)
        for name, table in _tables(meta_model):
            add(name, tuple(table.shape), hashlib.sha256(table.flatten().view(torch.uint8).numpy().data).digest())
    return digest.hexdigest()


class _Operators(TorchDispatchMode):
    """Passes on every operator: its name, its numbers, and which earlier results it reads."""

    def __init__(self, add: Any) -> None:
        super().__init__()
        self._add = add
        # Results are kept, so that no other object gets their identity.
        self._known: dict[int, tuple[int, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The row of padding matters to gradients alone.
        read = args[:2] if func is torch.ops.aten.embedding.default else args
        self._add(str(func), self._described(read), self._described(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self._described(out)
        return out

    def _described(self, value: Any) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return [self._described(each) for each in value]
        if isinstance(value, dict):
            return [(name, self._described(each)) for name, each in value.items()]
        is_plain = isinstance(value, (str, int, float, complex, torch.dtype, torch.device, torch.layout))
        return value if is_plain or value is None else str(type(value))

    def _tensor(self, value: Tensor) -> object:
        if isinstance(value, nn.Parameter):
            # Not which one, because tied ones are one.
            return "weight", tuple(value.shape)
        number, _ = self._known.setdefault(id(value), (len(self._known), value))
        has_data = not value.is_meta and value.numel() <= _MOST_VALUES
        return number, tuple(value.shape), str(value.dtype), value.tolist() if has_data else None


@torch.no_grad()
def _make_tables(meta_model: PreTrainedModel) -> None:
    """Gives the model's tables (buffers that no checkpoint has) their values, as Transformers does at a load."""
    for module in meta_model.modules():
        tables = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        for name, buffer in tables.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        if tables:
            setattr(module, "_is_hf_initialized", False)  # noqa: B010, its type has only tensors and modules
    meta_model.initialize_weights()


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    of_checkpoints = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name not in of_checkpoints:
            yield name, buffer
