"""Runs generated kernels on this CPU: Triton's interpreter, fed by the wrapper that Inductor wrote for CUDA.

Owns what the interpreter lacks (a conversion that NumPy 2.4 refuses, libdevice's functions), the exchange of CUDA's
allocations for CPU tensors, and which real tensor stands behind which fake one. `TRITON_INTERPRET=1` must be set before
Triton is imported. The interpreter of Triton 3.6 multiplies bfloat16 wrongly; float16 takes the same path.
"""

import contextlib
import types
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch._inductor import graph
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.runtime import interpreter

CUDA = torch.device("cuda", 0)


class Twins:
    """The real tensors behind fake ones, by storage."""

    def __init__(self) -> None:
        self._real: dict[int, Tensor] = {}
        # The outputs of the last call.
        self.outputs: list[Tensor] = []

    def pair(self, fake: Any, real: Any) -> None:
        """Registers the tensors in the attributes, lists and dicts of two objects with the same structure."""
        if isinstance(fake, Tensor):
            # A CPU's page lists are as wide as the pool. Entries beyond a GPU's width are never valid.
            with unset_fake_temporarily():
                part = real[tuple(slice(0, size) for size in fake.shape)]
                self._real[fake.untyped_storage()._cdata] = part.clone(memory_format=torch.contiguous_format)
        elif isinstance(fake, dict):
            for key, value in fake.items():
                self.pair(value, real[key])
        elif isinstance(fake, list | tuple):
            for one, other in zip(fake, real, strict=True):
                self.pair(one, other)
        elif type(fake).__module__.startswith("gpu_worker") and hasattr(fake, "__dict__"):
            self.pair(vars(fake), vars(real))

    def of(self, argument: Any) -> Any:
        """The real tensor with the shape and strides of a fake one; other arguments as they are."""
        if not isinstance(argument, Tensor):
            return argument
        real = self._real[argument.untyped_storage()._cdata]
        return real.as_strided(argument.shape, argument.stride(), argument.storage_offset())


def install(twins: Twins) -> None:
    """Replaces compiled calls by interpreted ones; to be called after `fake_device.install`."""
    mend_interpreter()
    to_module = graph.GraphLowering._compile_to_module

    def interpreted(lowering: graph.GraphLowering) -> Any:
        module = to_module(lowering)
        call = module.call
        scope = getattr(call, "__func__", call).__globals__
        scope["empty_strided_cuda"] = _poisoned
        scope["get_raw_stream"] = lambda _: 0

        def run(arguments: list[Any]) -> Sequence[Tensor]:
            given = list(arguments)
            arguments.clear()
            with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
                twins.outputs = list(call([twins.of(argument) for argument in given]))
            return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA) for t in twins.outputs]

        module.call = run
        return module

    graph.GraphLowering._compile_to_module = interpreted
    torch.cuda._DeviceGuard = lambda *_: contextlib.nullcontext()


def _poisoned(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of NaN, so that a result that is not written shows."""
    empty = torch.empty_strided(size, stride, dtype=dtype)
    return empty.fill_(float("nan")) if dtype.is_floating_point else empty.zero_()


def mend_interpreter() -> None:
    """Adds what it lacks. Triton 3.6 converts arrays of one element with int(), which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda own: int(own.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    triton_helpers.libdevice = types.SimpleNamespace(
        exp=lambda x: tl.math.exp(x),
        exp2=lambda x: tl.math.exp2(x),
        log2=lambda x: tl.math.log2(x),
        sqrt=lambda x: tl.math.sqrt(x),
        tanh=lambda x: 2 * tl.sigmoid(2 * x) - 1,
    )
