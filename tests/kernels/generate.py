"""Generates the Triton kernels of the worker's own attention calls, for the card that this process imitates.

Owns the calls of the worker's `Kernels` under FakeTensorMode, and the interception of Inductor's output: kernels are
recorded instead of compiled, and the call ends before anything would be launched.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_worker.attention.flex_kernel import DecodeAttention, PrefillAttention
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, LayerMap
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry
from gpu_worker.step.device_model import DeviceTables

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One Triton kernel as Inductor wrote it."""

    name: str
    source: str

    @property
    def is_template(self) -> bool:
        """Whether it is FlexAttention's own kernel; the others combine its splits."""
        return "_tem_" in self.name

    @property
    def normal_source(self) -> str:
        """The source without what differs between equal kernels: the number in its name, and comments."""
        return re.sub(r"#.*", "", self.source.replace(self.name, "kernel"))

    def constant(self, name: str) -> str:
        """The value of a constant of the template, such as BLOCK_N."""
        found = re.search(rf"\b{name} : tl\.constexpr = (\S+)", self.source)
        return found.group(1) if found else ""


class _GeneratedError(Exception):
    """Ends a call once its kernels are recorded."""


class Generator:
    """The kernels of a model's layers at one geometry; to be made after `fake_device.install`."""

    def __init__(self, layers: LayerMap, geometry: Geometry, dtype: torch.dtype) -> None:
        self._found: list[Kernel] = []
        self._intercept()
        self._layers, self._fake = layers, FakeTensorMode(allow_non_fake_inputs=True)
        self.shapes = Shapes.of(geometry)
        with self._fake, torch.inference_mode():
            self._cache = KvCache(
                layers, num_pages=geometry.num_pages, page_size=geometry.page_size, dtype=dtype, device=CUDA
            )
            self._kernels = FlexKernels(layers, geometry, self.shapes, DeviceTables(geometry, CUDA), dtype)

    def _intercept(self) -> None:
        def record(_: Any, name: str, source: str, device_str: str = "cuda") -> None:
            self._found.append(Kernel(name, source))

        def end(_: Any, scope: dict[str, Any]) -> None:
            raise _GeneratedError

        async_compile.AsyncCompile.triton = record
        async_compile.AsyncCompile.wait = end

    def decode(self, kind: AttentionKind, bucket: int) -> list[Kernel]:
        """The kernels of the decode call with `bucket` slots, in layers of `kind`."""
        index, part = self._first(kind), self._kernels.decode[bucket]
        return self._of_call(part[index], part[index].query, index)

    def prefill(self, kind: AttentionKind, bucket: int) -> list[Kernel]:
        """The kernels of the prefill call with `bucket` query positions, in layers of `kind`."""
        index, part = self._first(kind), self._kernels.prefill[bucket]
        with self._fake, torch.inference_mode():
            query = part[index].query.transpose(0, 1).unsqueeze(0)
        return self._of_call(part[index], query, index)

    def _first(self, kind: AttentionKind) -> int:
        return next(i for i, layer in enumerate(self._layers.layers) if layer.kind == kind)

    def _of_call(self, part: DecodeAttention | PrefillAttention, query: Tensor, index: int) -> list[Kernel]:
        kind, sinks = part.kind, None
        self._found.clear()
        torch._dynamo.reset()
        with self._fake, torch.inference_mode():
            if kind.pattern.has_learned_sinks:
                sinks = torch.zeros(kind.num_heads, dtype=query.dtype, device=CUDA)
                sinks = sinks.view(kind.num_kv_heads, kind.group) if isinstance(part, DecodeAttention) else sinks
            pool = self._cache.keys[index].unsqueeze(0), self._cache.values[index].unsqueeze(0)
            try:
                part.kernel(query, *pool, sinks)
            except Exception as error:  # the compiler wraps the exception in its own
                if not _is_caused_by(error, _GeneratedError):
                    raise
        return list(self._found)


def _is_caused_by(error: BaseException | None, cause: type[Exception]) -> bool:
    while error is not None:
        if isinstance(error, cause) or cause.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
