"""Counts what one decoder layer launches on an H200, without one: `python -m tests.kernels.layer_launches MODEL`.

Prints one JSON object: the kernels and library calls of the code that Inductor writes for the layer, which of them get
the pool, and the launches of the attention operator in a decode step and in a mixed step. Owns the interception of
Inductor's code.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import ATTENTION_NAME, StepContext, attach, attend, register
from gpu_worker.checkpoint.linear import merge_linears
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.cuda import kv_writes
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry
from gpu_worker.memory.model_facts import shared_inputs
from gpu_worker.step.device_model import DeviceTables
from gpu_worker.step.fused_layers import FusedLayers, compiling
from tests.kernels import fake_device
from tests.kernels.cards import H200
from tests.kernels.models import MODELS

CUDA, DTYPE = torch.device("cuda", 0), torch.bfloat16
GEOMETRY = Geometry(
    page_size=128,
    num_pages=64,
    max_rows=32,
    max_length=1024,
    token_budget=512,
    chunk_align=128,
    vocab_size=32,
)
# The kernel, and the reduction over its splits of K and V.
_FLEX_LAUNCHES = 2
# Operators that only describe memory.
_NO_LAUNCH = re.compile(
    r"prim\.device|aten\.(_unsafe_view|alias|as_strided|detach|empty|empty_like|expand|flatten|new_empty|permute|select|"
    r"slice|squeeze|transpose|unsqueeze|view)\."
)


class _Ended(Exception):
    """Ends a call once its code is known, because it cannot run."""


class Launches(TorchDispatchMode):
    """Counts operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _NO_LAUNCH.match(str(func)):
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def of_layer(name: str) -> dict[str, Any]:
    """The launches of a layer of the model `name`."""
    config = MODELS[name]()
    config.num_hidden_layers, config.vocab_size = 2, GEOMETRY.vocab_size
    layer_types = getattr(config, "layer_types", None)
    config.layer_types = layer_types and layer_types[:2]
    model = meta_model_of(config, dtype=DTYPE)
    layers, groups = check_model(model), shared_inputs(model)
    codes: list[str] = []
    _intercept(codes)
    fake_device.install(H200)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        shapes = Shapes.of(GEOMETRY)
        cache = KvCache(layers, num_pages=64, page_size=128, dtype=DTYPE, device=CUDA)
        kernels = FlexKernels(layers, GEOMETRY, shapes, DeviceTables(GEOMETRY, CUDA), DTYPE)
        model.to_empty(device=CUDA).requires_grad_(False)
        merge_linears(model, groups)
        attach(model, layers, cache)
        FusedLayers(model)
        arguments = {
            "input_ids": torch.zeros(1, 32, dtype=torch.int64, device=CUDA),
            "position_ids": torch.zeros(1, 32, dtype=torch.int64, device=CUDA),
            "use_cache": False,
            "step": decode_step(kernels),
        }
        with compiling():
            try:
                model.base_model(**arguments)
            except Exception:  # the compiled layer cannot run, so the layers run eagerly, which cannot run either
                if not codes:
                    raise
        generated, library = _launches_of(codes[0])
        return {
            "model": name,
            "kernels": generated,
            "library": library,
            "with_pool": _calls_with_pool(codes[0]),
            "decode": _of_attention(layers, cache, decode_step(kernels), 32),
            "mixed": _of_attention(layers, cache, mixed_step(kernels), 32 + 128),
        }


def decode_step(kernels: FlexKernels) -> StepContext:
    none = torch.zeros(0, dtype=torch.int64, device=CUDA)
    return StepContext(
        kv_slots=torch.zeros(32, dtype=torch.int64, device=CUDA),
        write_kv=kernels.write_kv,
        decode=kernels.decode[32],
        num_decode=32,
        prefill=None,
        prefill_places=none,
    )


def mixed_step(kernels: FlexKernels) -> StepContext:
    bucket, prefill = next(iter(kernels.prefill.items()))
    sizes = 32 + 128, 100, bucket
    slots, places, sources = (torch.zeros(size, dtype=torch.int64, device=CUDA) for size in sizes)
    step = replace(decode_step(kernels), kv_slots=slots, prefill=prefill, prefill_places=places)
    return replace(step, prefill_sources=sources)


def _of_attention(layers: LayerMap, cache: KvCache, step: StepContext, num_tokens: int) -> dict[str, int]:
    """The launches of the operator; FlexAttention's own are counted as the most that it makes."""
    kind = layers.layers[0].kind

    def flex(self: FlexKernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        counted.names["flex_attention"] += _FLEX_LAUNCHES
        return torch.empty_like(query)

    class Launch:
        """Stands for the kernel that writes K and V."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: counted.names.update(["write_kv"])

    query, key, value = (
        torch.zeros(1, num_tokens, heads, dim, dtype=DTYPE, device=CUDA).transpose(1, 2)
        for heads, dim in (
            (kind.num_heads, kind.key_dim),
            (kind.num_kv_heads, kind.key_dim),
            (kind.num_kv_heads, kind.value_dim),
        )
    )
    patches = patch.object(FlexKernel, "__call__", flex), patch.object(kv_writes, "_write", Launch())
    with patches[0], patches[1], Launches() as counted:
        attend(query, key, value, None, cache.keys[0], cache.values[0], step.number, 0)
    return dict(counted.names)


def _intercept(codes: list[str]) -> None:
    def end(_: Any, scope: dict[str, Any]) -> None:
        raise _Ended

    async_compile.AsyncCompile.triton = lambda *_, **__: None
    async_compile.AsyncCompile.wait = end
    GraphLowering.save_output_code = staticmethod(codes.append)
    inductor_config.joint_graph_constant_folding = False


def _launches_of(code: str) -> tuple[list[str], list[str]]:
    """The generated kernels that the code runs, and its calls of libraries, without the attention operator."""
    body = _body(code)
    library = re.findall(r"extern_kernels\.(\w+)\(", body) + re.findall(r"(torch\.ops\.\w+\.\w+)", body)
    return re.findall(r"(triton_\w+?)\.run\(", body), [call for call in library if call != "torch.ops.tandem.attend"]


def _body(code: str) -> str:
    """The function that launches; what follows it measures the code."""
    return re.split(r"\n(?=\S)", code[code.rindex("def call(") :])[0]


def _calls_with_pool(code: str) -> list[str]:
    """The lines that call something with K or V of the pool, but for the attention operator."""
    body = _body(code)
    call = re.search(r"torch\.ops\.tandem\.attend\.default\(.*?, None, (\w+), (\w+), ", body)
    assert call is not None, "the operator does not get the pool itself"
    uses = [line.strip() for line in body.splitlines() if re.search(rf"\b({call[1]}|{call[2]})\b.*\)$", line)]
    return [line for line in uses if not re.search(r"assert_size_stride|tandem\.attend", line)]


if __name__ == "__main__":
    print(json.dumps(of_layer(sys.argv[1])))
