"""Compiles each decoder layer around the attention operator, so that its small operations become few kernels.

Owns the compiled layers and the decision to leave them eager; the folder's README has the rules. Knows nothing of plans
or kernels.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as shapes_config

from gpu_worker.failures import first_line
from tandem_contract.plural import numbered

_code_numbers = count(1)


def _layer(layer: nn.Module, *args: Any, **keywords: Any) -> Any:
    return type(layer).forward(layer, *args, **keywords)


def _compiled_layer() -> Callable[..., Any]:
    """A compiled function for layers that share code. Dynamo limits recompiles by code object, so it has its own."""
    code = _layer.__code__.replace(co_name=f"decoder_layer_{next(_code_numbers)}")
    return torch.compile(FunctionType(code, globals(), code.co_name), dynamic=True, fullgraph=True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost entries of module lists that contain a paged attention module, in the order of the model."""
    layers: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for modules in model.modules():
        if not isinstance(modules, nn.ModuleList) or modules in inside:
            continue
        for layer in modules:
            if any(hasattr(module, "paged_layer") for module in layer.modules()):
                layers[layer] = None
                inside.update(layer.modules())
    return list(layers)


class FusedLayers:
    """The decoder layers of one model. Each compiles at its first calls; if one cannot, all stay eager."""

    def __init__(self, model: nn.Module) -> None:
        # Otherwise the first call of compiled code runs operators in a mode of its own, for which attention kernels
        # would compile a second time.
        functorch_config.check_custom_op_aliasing = False
        self.layers = decoder_layers(model)
        # Why the layers are eager; empty if they are compiled.
        self.why_eager = "" if self.layers else "no list of modules contains attention"
        compiled: dict[object, Callable[..., Any]] = {}
        for layer in self.layers:
            attention: list[Any] = [module for module in layer.modules() if hasattr(module, "paged_layer")]
            kernels = tuple(module.paged_layer.kernel_idx for module in attention)
            if (type(layer), kernels) not in compiled:
                compiled[type(layer), kernels] = _compiled_layer()
            run = compiled[type(layer), kernels]
            # An attribute of the instance comes before the class's forward.
            layer.forward = partial(self._call, run, layer)
        self.compiled = tuple(compiled.values())

    @property
    def summary(self) -> str:
        """What the log says of the layers after warm-up."""
        if self.why_eager:
            return f"decoder layers run eagerly: {self.why_eager}"
        return f"{numbered(len(self.layers), 'decoder layer', 'are')} compiled, {numbered(len(self.compiled), 'kind')}"

    def _call(self, run: Callable[..., Any], layer: nn.Module, *args: Any, **keywords: Any) -> Any:
        try:
            return run(layer, *args, **keywords)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # Raised before the layer's first operation.
            self.why_eager = f"{type(error).__name__}: {first_line(error)[:300]}"
            for other in self.layers:
                del other.forward
        return _layer(layer, *args, **keywords)


@contextmanager
def compiling() -> Iterator[None]:
    """The settings under which layers may compile: during warm-up."""
    with (
        # By default equal sizes are taken for one: a warm-up of as many tokens as a head has dimensions would fix the
        # number of tokens.
        shapes_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # By default each float of a module (the epsilon of a norm) is one more argument of the compiled code.
        dynamo_config.patch(specialize_float=True),  # type: ignore[attr-defined]
        # By default sizes that are no multiple of 8 are padded for some numbers of tokens, with code for each of them.
        inductor_config.patch(shape_padding=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        # The precision of float32 is the caller's choice.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        # A softmax over experts, which is as right without it.
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
        yield
