"""Which modules get native operators, and that a model computes the same with them."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gpu_worker.cpu.forwards import native_gate, native_norm, native_rotations, restore_forwards
from gpu_worker.cpu.replace import Replaced, replace_operators
from gpu_worker.native.library import native_library
from tests.gpu_worker.reference import float64_model
from tests.gpu_worker.rig import RigSpec, config_of

pytestmark = pytest.mark.skipif(native_library() is None, reason="the kernels cannot be built here")


class Norm(nn.Module):
    """An RMS norm with weight w + offset, or something that only looks like one."""

    def __init__(self, *, offset: float = 0.0, centred: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, generator=torch.Generator().manual_seed(1)))
        self.eps, self.offset, self.centred = eps, offset, centred

    def forward(self, x: Tensor) -> Tensor:
        own = x.float()
        own = own - own.mean(-1, keepdim=True) if self.centred else own
        own = own * torch.rsqrt(own.square().mean(-1, keepdim=True) + self.eps)
        return (own * (self.offset + self.weight.float())).to(x.dtype)


class GatedLayer(nn.Module):
    """down(activation(gate(x)) * up(x)), or with a limit on the gate, which some models have."""

    def __init__(self, activation: nn.Module, *, limit: float | None = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)
        self.activation, self.limit = activation, limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = gate if self.limit is None else gate.clamp(max=self.limit)
        return self.down(self.activation(gate) * self.up(x))


class MergedGate(nn.Module):
    """Gate and up as halves of one layer; up may come first."""

    def __init__(self, *, up_first: bool) -> None:
        super().__init__()
        self.gate_up, self.down, self.up_first = nn.Linear(32, 96), nn.Linear(48, 32), up_first

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(other) * one if self.up_first else nn.functional.silu(one) * other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_are_recognised(offset: float, dtype: torch.dtype) -> None:
    module = Norm(offset=offset).to(dtype)
    native = native_norm(module)
    assert native is not None
    x = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.testing.assert_close(native(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize(
    "module", [Norm(offset=0.5), Norm(centred=True), nn.LayerNorm(48, bias=False), Norm().half(), nn.Linear(1, 48)]
)
def test_other_modules_are_no_norms(module: nn.Module) -> None:
    assert native_norm(module) is None


@torch.no_grad()
@pytest.mark.parametrize(
    "module",
    [
        GatedLayer(nn.SiLU()),
        GatedLayer(nn.GELU(approximate="tanh")),
        MergedGate(up_first=False),
        MergedGate(up_first=True),
    ],
)
def test_gated_layers_are_recognised(module: nn.Module) -> None:
    native = native_gate(module)
    assert native is not None
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(native(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize(
    "module",
    [GatedLayer(nn.ReLU()), GatedLayer(nn.GELU()), GatedLayer(nn.SiLU(), limit=7.0), nn.Sequential(nn.Linear(4, 4))],
)
def test_other_modules_are_not_gated_layers(module: nn.Module) -> None:
    assert native_gate(module) is None


@pytest.mark.parametrize(("family", "norms"), [("qwen3", 9), ("llama", 5), ("gemma2", 9)])
def test_a_model_computes_the_same(family: str, norms: int) -> None:
    """Against float64, within the error of Transformers' own operators."""
    torch.manual_seed(3)
    spec = RigSpec(page_size=64, group=2, head_dim=64, family=family)
    own = AutoModelForCausalLM.from_config(config_of(spec), dtype=torch.float32).eval()
    served = copy.deepcopy(own)
    assert replace_operators(served) == Replaced(norms=norms, gates=2, rotations=2)
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        exact = float64_model(own)(ids).logits
        error, usual = ((model(ids).logits.double() - exact).norm() for model in (served, own))
        assert error <= 2 * usual
        restore_forwards(served)
        assert torch.equal(served(ids).logits, own(ids).logits)


def rotated(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
    cosine, sine = cosine.unsqueeze(axis), sine.unsqueeze(axis)

    def half(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([-other, one], -1)

    return query * cosine + half(query) * sine, key * cosine + half(key) * sine


class Rotating(nn.Module):
    """Calls a rotation with a name and arguments that no model uses."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.cat(rotated(x, x, table.cos(), table.sin()))


def with_hints(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **{"table" if name == "old" else name: value for name, value in options.items()})

    return called


class Decorated(nn.Module):
    """The same below two decorators, which rename an argument."""

    forward = with_hints(with_hints(Rotating.forward))


@pytest.mark.parametrize("module", [Rotating(), Decorated()], ids=lambda module: type(module).__name__)
def test_rotations_are_recognised(module: nn.Module) -> None:
    native = native_rotations(module, {})
    assert native is not None
    generator = torch.Generator().manual_seed(4)
    x, table = torch.randn(1, 2, 5, 16, generator=generator), torch.randn(1, 5, 16, generator=generator)
    options = {"old": table} if isinstance(module, Decorated) else {"table": table}
    with pytest.MonkeyPatch.context() as patch:
        # The module's own function is called by its own forward only.
        expected = module(x, **options)
        patch.setattr(f"{__name__}.rotated", None)
        torch.testing.assert_close(native(x, **options), expected)


def test_what_a_config_lets_expect_and_was_not_found_is_said() -> None:
    spec = RigSpec(page_size=64, group=2, head_dim=64, family="qwen3")
    config = config_of(spec)
    assert list(Replaced(norms=1, gates=1, rotations=1).lacking(config)) == []
    assert [line.split(" of ")[0] for line in Replaced().lacking(config)] == [
        "no norm",
        "no gated layer",
        "no rotary embedding",
    ]
    [line] = Replaced(norms=1, gates=1).lacking(config)
    assert "of qwen3 is computed by a native operator, although its config has rope_parameters" in line
