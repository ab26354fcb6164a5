"""Replaces the small operators of a loaded model by native ones, where they compute the same.

Owns the order of replacements, their count, and what a model lacks. Each is compared with the module that it replaces,
on the real weights, before it is used.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig

from gpu_worker.cpu.forwards import native_gate, native_norm, native_rotations
from gpu_worker.native.library import native_library
from tandem_contract.plural import numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """A kind of operator that a config lets expect, and how many times as long a decode step takes without it."""

    # The fields of which one is there, and its values; none: any but None.
    fields: tuple[str, ...]
    values: tuple[str, ...] = ()
    what: str
    # The times of eight rows of Qwen3's architecture, 1,024 wide, in bfloat16 on one thread; each kind left out alone.
    times: float


_EXPECTED = {
    "norms": _Expected(fields=("rms_norm_eps",), what="norm", times=1.12),
    "gates": _Expected(
        fields=("hidden_act", "hidden_activation"),
        values=("silu", "swish", "gelu_pytorch_tanh"),
        what="gated layer",
        times=1.03,
    ),
    "rotations": _Expected(fields=("rope_parameters",), what="rotary embedding", times=1.06),
}


class Replaced(Counter[str]):
    """How many modules of each kind have native operators."""

    def __str__(self) -> str:
        return ", ".join(numbered(self[kind], expected.what) for kind, expected in _EXPECTED.items())

    def lacking(self, config: PreTrainedConfig) -> Iterator[str]:
        """A sentence for each kind of which none was found, although the config has its fields."""
        text = config.get_text_config()
        for kind, expected in _EXPECTED.items():
            fields = [(name, value) for name in expected.fields if (value := getattr(text, name, None)) is not None]
            signs = [name for name, value in fields if not expected.values or value in expected.values]
            if signs and not self[kind]:
                yield (
                    f"no {expected.what} of {text.model_type} is computed by a native operator, although its config "
                    f"has {signs[0]}: a decode step takes up to {expected.times:g} times as long"
                )


@torch.no_grad()
def replace_operators(model: nn.Module) -> Replaced:
    """Replaces the forwards of the model's modules on a CPU; of none if the kernels cannot be built."""
    replaced = Replaced()
    if native_library() is None:
        return replaced
    natives = {"norms": native_norm, "gates": native_gate, "rotations": partial(native_rotations, replaced={})}
    for module in model.modules():
        if "forward" in vars(module):
            # Transformers has replaced it, to share the module among ranks.
            continue
        for kind, native_of in natives.items():
            if (native := native_of(module)) is not None:
                # An attribute of the instance comes before the class's forward.
                module.forward = native
                replaced[kind] += 1
                break
    return replaced
