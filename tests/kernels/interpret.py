"""Interprets the kernels of cases, in a process of its own.

`TRITON_INTERPRET=1 python -m tests.kernels.interpret NAME…` prints one JSON object per call of a case: its error
against float64, that of the same attention in the case's dtype, and the largest value of idle decode slots.
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_worker.attention.flex_kernel import DecodeAttention
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, AttentionPattern
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.step.device_model import DeviceTables
from tests.kernels import fake_device, interpreter
from tests.kernels.cards import A10G
from tests.kernels.interpreted_steps import Case, Queries, Steps, attention
from tests.kernels.test_interpreter import KINDS

# Few multiprocessors, so that decode rows have few splits, which are interpreted one after another.
CARD = replace(A10G, num_multiprocessors=24)


def _kind(head_dim: int = 64, group: int = 2, *, softcap: float | None = None, **pattern: Any) -> AttentionKind:
    return AttentionKind(
        num_heads=2 * group,
        num_kv_heads=2,
        key_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        softcap=softcap,
        pattern=AttentionPattern(**pattern),
    )


def _case(name: str) -> Case:
    kind, dtype = name.rsplit(": ", 1)
    page = 16 if "pages of 16" in kind else 128
    return Case(kind=_kind(**KINDS[kind]), dtype=getattr(torch, dtype), page_size=page)


def main(names: list[str]) -> None:
    """Prints the results of the cases."""
    twins = interpreter.Twins()
    fake_device.install(CARD)
    interpreter.install(twins)
    for name in names:
        begun = time.monotonic()
        for result in _interpreted(_case(name), twins):
            print(json.dumps({"case": name, **result}), flush=True)
        print(f"{name}: interpreted in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _interpreted(case: Case, twins: interpreter.Twins) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    torch._dynamo.reset()
    steps, geometry = Steps(case), case.geometry
    # Page 0 and the page of learned sinks stay zero, as in the worker.
    for pool in steps.cache.pools:
        pool[:, geometry.page_size : geometry.num_pages * geometry.page_size].normal_()
    sinks = torch.randn(case.kind.num_heads, dtype=case.dtype) if case.kind.pattern.has_learned_sinks else None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.inference_mode():
        tables = DeviceTables(geometry, interpreter.CUDA)
        cache = KvCache(
            case.layers,
            num_pages=geometry.num_pages,
            page_size=geometry.page_size,
            dtype=case.dtype,
            device=interpreter.CUDA,
        )
        shapes = Shapes.of(geometry)
        kernels = FlexKernels(case.layers, geometry, shapes, tables, case.dtype)
    half = steps.lengths[3] // 2
    plans: list[tuple[dict[int, int], list[int]]] = [
        ({1: 1, 2: steps.lengths[2], 3: half, 4: steps.lengths[4]}, []),
        ({3: steps.lengths[3] - half}, [2, 4, 1]),
        ({}, [3, 1, 2]),
    ]
    results = []
    for chunks, decode in plans:
        context, of_decode, of_prefill = steps.run(chunks, decode)
        for queries, parts, fakes in (
            (of_decode, context.decode, kernels.decode),
            (of_prefill, context.prefill, kernels.prefill),
        ):
            if queries is None:
                continue
            real = parts[0]
            fake = next(own[0] for own in fakes.values() if own[0].query.shape == real.query.shape)
            real.query.normal_()
            twins.pair((fake, tables, cache), (real, steps.on_device, steps.cache))
            with mode, torch.inference_mode():
                _call(fake, cache, sinks, twins)
            results.append(_compared(case, steps, queries, real, twins.outputs[0], sinks))
    return results


def _call(part: Any, cache: KvCache, sinks: Tensor | None, twins: interpreter.Twins) -> None:
    is_decode, fake_sinks = isinstance(part, DecodeAttention), None
    query = part.query if is_decode else part.query.transpose(0, 1).unsqueeze(0)
    if sinks is not None:
        fake_sinks = torch.zeros(sinks.shape, dtype=sinks.dtype, device=interpreter.CUDA)
        twins.pair(fake_sinks, sinks)
        fake_sinks = fake_sinks.view(part.query.shape[1:3]) if is_decode else fake_sinks
    part.kernel(query, cache.keys[0].unsqueeze(0), cache.values[0].unsqueeze(0), fake_sinks)


def _compared(
    case: Case, steps: Steps, queries: Queries, part: Any, output: Tensor, sinks: Tensor | None
) -> dict[str, Any]:
    is_decode, places = isinstance(part, DecodeAttention), torch.from_numpy(queries.places)
    shape = (-1, case.kind.num_heads, case.kind.head_dim)
    found = output.reshape(shape) if is_decode else output[0].transpose(0, 1)
    asked = part.query.reshape(shape)[places]
    exact = attention(case, steps, queries, asked, sinks, torch.float64)
    eager = attention(case, steps, queries, asked, sinks, case.dtype)
    idle = torch.ones(len(found), dtype=torch.bool)
    idle[places] = False
    return {
        "call": "decode" if is_decode else "prefill",
        "tokens": len(places),
        "idle": int(idle.sum()) if is_decode else 0,
        "error": _error(found[places], exact),
        "eager_error": _error(eager, exact),
        "largest_idle": float(found[idle].abs().max()) if is_decode and idle.any() else 0.0,
    }


def _error(found: Tensor, exact: Tensor) -> float:
    """Root mean square difference."""
    return float((found.double() - exact).square().mean().sqrt())


if __name__ == "__main__":
    main(sys.argv[1:])
