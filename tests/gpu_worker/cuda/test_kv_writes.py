"""K and V of a step's tokens arrive in the pool, and nothing else changes: indexed assignment, and a card's kernel.

The kernel runs with `--device cuda`, and under Triton's interpreter with `TRITON_INTERPRET=1`: `make test-kernels`.
"""

import os

import pytest
import torch
from torch import Tensor

from gpu_worker.attention.paged import WriteKv, assign_kv

NUM_SLOTS, UNWRITTEN = 40, 7.0


def writers(device: torch.device) -> list[WriteKv]:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return [assign_kv]
    from gpu_worker.cuda.kv_writes import write_kv

    return [assign_kv, write_kv]


def packed(heads: int, tokens: int, dim: int, layout: str, draw: torch.Generator) -> Tensor:
    """[heads, tokens, dim] as projections, merged ones, groups that share a head, and rotations leave them."""
    if layout == "merged":
        return torch.randn(tokens, heads * dim + 24, generator=draw)[:, 24:].view(tokens, heads, dim).transpose(0, 1)
    if layout == "shared":
        return torch.randn(1, tokens, dim, generator=draw).expand(heads, tokens, dim)
    if layout == "columns":
        return torch.randn(heads, dim, tokens, generator=draw).transpose(1, 2)
    return torch.randn(heads, tokens, dim, generator=draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["plain", "merged", "shared", "columns"])
@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim", "pool_dim"), [(1, 16, 16, 16), (8, 128, 128, 128), (3, 40, 24, 48), (2, 5, 5, 16)]
)
def test_keys_and_values_arrive_and_nothing_else_changes(
    heads: int, key_dim: int, value_dim: int, pool_dim: int, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    draw = torch.Generator().manual_seed(heads)
    for tokens in (1, 2, 19):
        slots = torch.randperm(NUM_SLOTS, generator=draw)[:tokens]
        key = packed(heads, tokens, key_dim, layout, draw)
        value = packed(heads, tokens, value_dim, layout, draw)
        expected = torch.full((2, heads, NUM_SLOTS, pool_dim), UNWRITTEN, dtype=dtype)
        for token, slot in enumerate(slots.tolist()):
            expected[0, :, slot, :key_dim] = key[:, token].to(dtype)
            expected[1, :, slot, :value_dim] = value[:, token].to(dtype)
        for write in writers(device):
            keys, values = torch.full_like(expected, UNWRITTEN, device=device)
            write(key.to(device, dtype), value.to(device, dtype), keys, values, slots.to(device))
            assert torch.equal(keys.cpu(), expected[0])
            assert torch.equal(values.cpu(), expected[1])


def test_padding_writes_one_slot_many_times(device: torch.device) -> None:
    """Padding of a step has slot 0; any of its tokens may win, and the others stay as they are."""
    key = torch.arange(1.0, 33.0, device=device).view(1, 32, 1).expand(2, 32, 16)
    for write in writers(device):
        keys, values = torch.zeros(2, 2, NUM_SLOTS, 16, device=device)
        slots = torch.tensor([5, *[0] * 31], device=device)
        write(key, -key, keys, values, slots)
        assert keys[:, 5].eq(1).all()
        assert values[:, 5].eq(-1).all()
        assert keys[:, 0].ge(2).all()
        assert torch.equal(keys.count_nonzero(dim=1), torch.full((2, 16), 2, device=device))
