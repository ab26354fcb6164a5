"""Packed layers as a model uses them: inputs of any form, tied weights, compiled layers, and what loading frees."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from gpu_worker.checkpoint import linear as packing
from gpu_worker.checkpoint.linear import PackedLinear, can_pack, linear_kernel, pack_linears
from gpu_worker.step.fused_layers import compiling

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(CPU, dtype)]
needs_kernel = pytest.mark.skipif(linear_kernel(torch.float32) is None, reason="the C++ kernels are not built here")


@pytest.fixture(params=["kernel", "oneDNN"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layouts of float32 weights that this machine has."""
    if request.param == "oneDNN":
        monkeypatch.setattr(packing, "linear_kernel", lambda _: None)
    elif linear_kernel(torch.float32) is None:
        pytest.skip("the C++ kernels are not built here")
    if not can_pack(CPU, torch.float32):
        pytest.skip("this torch has no oneDNN")
    return request.param


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return nn.functional.linear(x.double(), linear.weight.double(), bias)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_inputs_of_every_form(layout: str, bias: bool) -> None:
    linear = nn.Linear(48, 80, bias=bias)
    packed = PackedLinear(linear)
    whole = torch.randn(40, 2, 3 * 48)
    forms = [
        whole[0, 0, :48],
        whole[:, 0, :48],
        whole[1:2, :, 48:96],
        whole[..., ::3],
        whole[:, :, 96:].transpose(0, 1),
    ]
    for x in forms:
        y = packed(x)
        assert y.shape == (*x.shape[:-1], 80)
        assert (y.double() - exact(linear, x)).abs().max() < 1e-5


@torch.inference_mode()
def test_the_plain_weight_comes_back(layout: str) -> None:
    for sizes in ((48, 80), (37, 70)):
        linear = nn.Linear(*sizes)
        packed = PackedLinear(linear)
        assert torch.equal(packed.weight, linear.weight)
        assert packed.bias is not None and torch.equal(packed.bias, linear.bias)
        assert (packed.in_features, packed.out_features, packed.num_bytes) == (*sizes, linear.weight.nbytes)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_weight_is_copied(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(70, 37), "head": nn.Linear(37, 70, bias=False)}).to(dtype)
    model["head"].weight = model["embedding"].weight
    before = model["embedding"].weight.clone()
    assert pack_linears(model) == 1
    assert torch.equal(model["embedding"].weight, before)
    assert torch.equal(model["head"].weight, before)
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_share_memory_without_overlap(dtype: torch.dtype) -> None:
    sizes = [(37, 70), (16, 64), (5, 1)]
    model = nn.Sequential(*(nn.Linear(*each) for each in sizes)).to(dtype)
    # A layer of another dtype, as routers of experts are.
    model.append(nn.Linear(3, 5))
    weights = [layer.weight.clone() for layer in model]
    assert pack_linears(model) == 4
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model, weights, strict=True))


def test_a_weight_is_freed_before_the_next_is_packed(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []

    class Counting(PackedLinear):
        def __init__(self, linear: nn.Linear, memory: Tensor | None = None) -> None:
            super().__init__(linear, memory)
            # A smaller layer probes oneDNN.
            if linear.in_features == 64:
                alive.append(sum(each() is not None for each in weights))

    monkeypatch.setattr(packing, "PackedLinear", Counting)
    assert pack_linears(model) == 4
    assert alive == [4, 3, 2, 1]


@torch.inference_mode()
def test_a_compiled_layer_calls_one_operator(layout: str) -> None:
    calls: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    linear = nn.Linear(48, 80)
    packed = PackedLinear(linear)
    compiled = torch.compile(packed, backend=backend, dynamic=True, fullgraph=True)
    with compiling():
        for num_rows in (2, 7, 33):
            x = torch.randn(1, num_rows, 48)
            assert torch.equal(compiled(x), packed(x))
    assert len(calls) == 1 and "tandem.packed_linear" in calls[0]


@torch.inference_mode()
@needs_kernel
def test_a_result_does_not_depend_on_the_batch() -> None:
    packed = PackedLinear(nn.Linear(700, 130))
    x = torch.randn(70, 700)
    alone = torch.cat([packed(row[None]) for row in x])
    for num_rows in (2, 8, 33, 70):
        assert torch.equal(packed(x[:num_rows]), alone[:num_rows])


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.device("meta"), torch.float32)
    assert not can_pack(CPU, torch.float64)
    monkeypatch.setattr(packing, "linear_kernel", lambda _: None)
    assert can_pack(CPU, torch.float32) == torch.backends.mkldnn.is_available()
    # oneDNN's layout gains nothing in bfloat16 without AVX512_BF16, and the kernel covers CPUs with it.
    assert not can_pack(CPU, torch.bfloat16)
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16))
    assert pack_linears(model) == 0 and type(model[0]) is nn.Linear
