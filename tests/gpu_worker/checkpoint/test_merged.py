"""Merged linear layers equal the layers that they replace, packed or not, compiled or not, with any input."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gpu_worker.checkpoint.linear import MergedLinear, PackedLinear, merge_linears, pack_linears

NAMES = ("q", "k", "v")


class Block(nn.Module):
    """Three layers of one input, and a fourth."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8, bias=bias), nn.Linear(6, 4, bias=bias), nn.Linear(6, 4, bias=bias)
        self.o = nn.Linear(4, 6, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q, k, v, self.o(k * v)


def blocks(*, bias: bool, packs: bool) -> tuple[Block, Block]:
    torch.manual_seed(3)
    plain = Block(bias=bias).requires_grad_(False)
    merged = copy.deepcopy(plain)
    merge_linears(merged, (NAMES,))
    assert all(type(merged.get_submodule(name)) is MergedLinear for name in NAMES)
    if packs:
        pack_linears(merged)
    return plain, merged


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_group_computes_what_its_layers_computed(bias: bool, packs: bool) -> None:
    plain, merged = blocks(bias=bias, packs=packs)
    for x in (torch.randn(1, 5, 6), torch.randn(1, 1, 6)):
        torch.testing.assert_close(merged(x), plain(x))
    for name in NAMES:
        one, other = merged.get_submodule(name), plain.get_submodule(name)
        assert torch.equal(one.weight, other.weight)
        assert one.out_features == other.out_features
        assert one.bias is None if not bias else torch.equal(one.bias, other.bias)


@torch.inference_mode()
def test_a_group_is_one_product() -> None:
    plain, merged = blocks(bias=False, packs=False)
    assert [type(merged.get_submodule(name)) for name in NAMES] == [MergedLinear] * 3
    calls: list[int] = []
    merged.q.merged.register_forward_hook(lambda *_: calls.append(1))
    merged(torch.randn(1, 5, 6))
    assert len(calls) == 1
    assert sum(parameter.numel() for parameter in merged.parameters()) == sum(
        parameter.numel() for parameter in plain.parameters()
    )


@pytest.mark.parametrize("packs", [False, True])
@torch.inference_mode()
def test_a_layer_with_another_input_computes_its_own_part(packs: bool) -> None:
    plain, merged = blocks(bias=True, packs=packs)
    x, other = torch.randn(1, 5, 6), torch.randn(1, 5, 6)
    merged.q(x)
    torch.testing.assert_close(merged.k(other), plain.k(other))
    torch.testing.assert_close(merged.v(x), plain.v(x))
    # The product is dropped after the last layer.
    torch.testing.assert_close(merged.k(x), plain.k(x))


@torch.inference_mode()
def test_a_compiled_group_is_one_graph_without_side_effects() -> None:
    plain, merged = blocks(bias=True, packs=False)
    compiled = torch.compile(merged, backend="eager", fullgraph=True, dynamic=True)
    for num_tokens in (5, 7):
        x = torch.randn(1, num_tokens, 6)
        torch.testing.assert_close(compiled(x), plain(x))
    assert merged.q._product.output is None


def test_a_group_with_another_kind_of_layer_stays() -> None:
    block = Block(bias=False)
    block.v = nn.Sequential(block.v)
    merge_linears(block, (NAMES,))
    assert type(block.q) is type(block.k) is nn.Linear and type(block.v) is nn.Sequential


def test_packed_groups_have_one_packed_weight() -> None:
    _, merged = blocks(bias=True, packs=True)
    packed = [module for module in merged.modules() if isinstance(module, PackedLinear)]
    assert [module.out_features for module in packed] == [16, 6]
