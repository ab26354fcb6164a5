"""Compiled decoder layers: right results, one compilation for each kind of layer, and eager layers where one fails."""

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_fn
from torch._dynamo.utils import counters

from gpu_worker.attention.paged import StepContext, paged_attention
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.step.fused_layers import FusedLayers, compiling, decoder_layers
from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.rig import Recording, Rig, RigSpec

# It imports the compiler, which takes seconds.
pytestmark = pytest.mark.together("compiled here")

# Two kinds of layers, each of which compiles for several tokens and for one. Other families: the long tests.
GEMMA2 = RigSpec(page_size=16, group=2, head_dim=24, family="gemma2", window=21, chunk_align=32, fused=True)
MORE = [
    RigSpec(page_size=16, group=1, head_dim=64, chunk_align=32, fused=True),
    RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32, fused=True),
    RigSpec(page_size=16, group=3, head_dim=40, family="gpt_oss", window=9, fused=True),
    RigSpec(page_size=16, group=7, head_dim=64, family="mistral", window=37, dtype=torch.bfloat16, fused=True),
]
SPECS = [GEMMA2, *(pytest.param(spec, marks=pytest.mark.long) for spec in MORE)]


@pytest.fixture(params=SPECS, ids=str, scope="module")
def rig(request: pytest.FixtureRequest, rig_of: Callable[[RigSpec], Rig]) -> Rig:
    return rig_of(request.param)


def mixed_steps(rig: Rig) -> tuple[TinyCore, Recording]:
    """Prompts in chunks, beside decode rows and alone, and decode steps of one row to three."""
    page_size, core, recording = rig.spec.page_size, rig.core(), Recording()
    core.add(3, rig.prompt(page_size - 2, seed=20))
    core.add(1, rig.prompt(page_size + 9, seed=21))
    rig.step(core, recording, chunks={3: page_size - 2})
    rig.step(core, recording, chunks={1: 7}, decode=[3])
    rig.step(core, recording, chunks={1: page_size + 2}, decode=[3])
    core.add(2, rig.prompt(1, seed=22))
    rig.step(core, recording, chunks={2: 1})
    for rows in ([3], [3, 1], [3, 1, 2]):
        rig.step(core, recording, decode=rows)
    return core, recording


def test_steps_match_eager_attention(rig: Rig) -> None:
    """Within the error of eager attention on the same weights, against float64."""
    rig.check(*mixed_steps(rig))


def test_layers_of_a_kind_are_compiled_once_and_never_again(rig: Rig) -> None:
    """For several tokens and for one. Numbers of tokens and of contexts are free."""
    fused = rig.runner.on_device.fused
    assert fused is not None
    assert fused.why_eager == ""
    assert len(fused.compiled) == len(rig.runner.on_device.layers.kinds)
    before = compilations(fused)
    assert all(count <= 2 for count in before)
    assert eager_calls(rig) == 0
    assert compilations(fused) == before


def compilations(fused: FusedLayers) -> list[int]:
    return [len(_debug_get_cache_entry_list(innermost_fn(run).__code__)) for run in fused.compiled]


def eager_calls(rig: Rig) -> int:
    """Calls of the attention interface in `mixed_steps`; compiled layers contain it instead."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is paged_attention.__code__

    sys.setprofile(count)
    try:
        mixed_steps(rig)
    finally:
        sys.setprofile(None)
    return calls


def test_the_self_checks_reference_is_not_compiled(rig_of: Callable[[RigSpec], Rig]) -> None:
    """It adds noise through hooks of modules inside the layers, which compiled code does not call."""
    rig = rig_of(GEMMA2)
    before = compilations(rig.runner.on_device.fused)
    assert check_runner(rig.served, rig.runner, torch.float32) < 1e-4
    assert compilations(rig.runner.on_device.fused) == before


def test_a_second_start_takes_everything_from_the_cache(rig_of: Callable[[RigSpec], Rig], device: torch.device) -> None:
    rig_of(GEMMA2)
    before = counters["inductor"]["fxgraph_cache_miss"]
    assert Rig(GEMMA2, device).runner.on_device.fused.why_eager == ""
    assert counters["inductor"]["fxgraph_cache_miss"] == before


class Layer(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.attention = nn.Identity()
        self.attention.paged_layer = SimpleNamespace(kernel_idx=0)
        self.breaks = breaks

    def forward(self, x: Tensor, step: StepContext | None = None) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return x + 1


def test_one_layer_that_cannot_compile_leaves_all_eager() -> None:
    model = nn.Sequential(nn.ModuleList([Layer(breaks=True), Layer(breaks=True)]))
    fused = FusedLayers(model)
    with compiling(), torch.inference_mode():
        assert torch.equal(model[0][0](torch.zeros(2)), torch.ones(2))
    assert "graph_break" in fused.why_eager
    assert fused.summary.startswith("decoder layers run eagerly: ")
    assert not any("forward" in vars(layer) for layer in fused.layers)


def test_layers_are_the_outermost_parts_of_lists_that_attend() -> None:
    group = nn.Sequential(nn.ModuleList([Layer(), Layer()]))
    model = nn.Sequential(nn.ModuleList([group, Layer()]), nn.ModuleList([nn.Identity()]))
    assert decoder_layers(model) == [group, model[0][1]]
    assert FusedLayers(nn.Sequential(Layer())).why_eager == "no list of modules contains attention"
