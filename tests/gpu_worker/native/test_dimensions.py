"""Every kernel at many dimensions, at all from 1 to 320 in `long`, for every instruction set here, against float64.

A loop may step by vectors, by blocks of 16 or 32 dimensions or by panels, and each has an end of its own. What
surrounds inputs and pages is NaN, so that an element that is read beside them shows; `native/README.md` has the command
for AddressSanitizer, which sees the rest.
"""

from collections.abc import Sequence
from ctypes import c_int32

import pytest
import torch

from gpu_worker.attention.layers import AttentionKind
from gpu_worker.checkpoint.linear import kernel_of
from gpu_worker.cpu.attention import KvWriter
from gpu_worker.native.library import NativeLibrary
from tests.gpu_worker.cpu import attention_rig as attention
from tests.gpu_worker.native.test_operators import ACTIVATIONS, assert_close, call, randn

DIMS = range(1, 321)
# Every remainder of every vector, block and panel, and the sizes around larger blocks.
SOME = [*range(1, 73), *(edge + step for edge in (80, 96, 128, 192, 256, 319) for step in (-1, 0, 1)), 100, 300]
# Query heads per KV head: each has loops of its own in decode attention.
GROUPS = (1, 2, 4, 8)
# Short pages are copied before they are multiplied, long ones are read in place.
PAGE_SIZES = (16, 64)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SPANS = pytest.mark.parametrize(
    "dims", [pytest.param(SOME, id="some"), pytest.param(DIMS, id="all", marks=pytest.mark.long)]
)


def kinds(dim: int, group: int) -> list[AttentionKind]:
    """Keys of this dimension, with values as long and of another dimension."""
    return [
        AttentionKind(num_heads=group, num_kv_heads=1, key_dim=dim, value_dim=value_dim, scale=dim**-0.5)
        for value_dim in (dim, 1 + (dim * 7) % len(DIMS))
    ]


@TYPES
@SPANS
def test_decode_rows(library: NativeLibrary, dtype: torch.dtype, dims: Sequence[int]) -> None:
    for dim in dims:
        for group in GROUPS:
            kind = kinds(dim, group)[(dim + group) % 2]
            attention.assert_close(attention.Rows(kind, (19,), PAGE_SIZES[dim % 2], dtype), library)


@TYPES
@SPANS
def test_prompt_chunks(library: NativeLibrary, dtype: torch.dtype, dims: Sequence[int]) -> None:
    for dim in dims:
        for kind, page_size in zip(kinds(dim, 1 + dim % 3), PAGE_SIZES, strict=True):
            attention.assert_close(
                attention.Step(kind, [attention.Chunk(start=7, count=13)], page_size, dtype), library
            )


@TYPES
@SPANS
def test_keys_and_values_are_written(library: NativeLibrary, dtype: torch.dtype, dims: Sequence[int]) -> None:
    write, slots = KvWriter(library, dtype), torch.tensor([3, 0])
    for dim in dims:
        key, value = randn(1, 2, dim, dtype=dtype), randn(1, 2, 321 - dim, dtype=dtype)
        found, expected = torch.full((2, 2, 1, 4, 320), 7.0, dtype=dtype)
        write(key, value, found[0], found[1], slots)
        expected[0][:, slots, :dim], expected[1][:, slots, : 321 - dim] = key, value
        assert torch.equal(found, expected), dim


@TYPES
@SPANS
def test_linear_layers(library: NativeLibrary, dtype: torch.dtype, dims: Sequence[int]) -> None:
    kernel = kernel_of(library, dtype)
    if kernel is None:
        pytest.skip(f"{library.instructions} has no such kernel")
    for dim in dims:
        for num_in, num_out in ((dim, 1 + (dim * 7) % 320), (1 + (dim * 7) % 320, dim)):
            # Numbers of rows that fill tiles, and not.
            x, weight = randn(1 + dim % 8, num_in, dtype=dtype), randn(num_out, num_in, dtype=dtype, seed=2)
            exact, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
            found = kernel.multiply(x, kernel.pack(weight), None, num_out)
            error = (found.double() - exact).abs()
            allowed = (num_in + 1) * 2.0**-24 * terms + torch.finfo(dtype).eps * exact.abs()
            assert bool((error <= allowed).all()), (num_in, num_out)


@TYPES
@SPANS
def test_small_operators(library: NativeLibrary, dtype: torch.dtype, dims: Sequence[int]) -> None:
    is_bfloat16, one = c_int32(dtype is torch.bfloat16), c_int32(1)
    for dim in dims:
        # Four rows of a wider matrix, with NaN in its other elements; twice two where an operator has two dimensions.
        wide = torch.full((2, 4, dim + 3), torch.nan, dtype=dtype)
        x, y = wide[0, :, :dim], wide[1, :, :dim]
        x.copy_(6 * randn(4, dim, dtype=dtype)), y.copy_(randn(4, dim, dtype=dtype, seed=2))
        exact_x, exact_y, stride = x.double(), y.double(), x.stride(0)
        whole = torch.full((4 * dim + 8,), 7.0, dtype=dtype)
        out = whole[4:-4].view(4, dim)

        weight = randn(dim, dtype=torch.float32, seed=3)
        call(library, "tandem_rms_norm", x, weight, out, 2, 2, dim, 2 * stride, stride, 1e-3, is_bfloat16, one)
        exact = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
        assert_close(out, exact, exact)

        for activation, function in enumerate(ACTIVATIONS):
            call(library, "tandem_gated", x, y, out, 4, dim, stride, stride, c_int32(activation), is_bfloat16, one)
            assert_close(out, function(exact_x) * exact_y, exact_x * exact_y)

        call(library, "tandem_add", x, y, out, dim, is_bfloat16, one)
        assert_close(out[0], exact_x[0] + exact_y[0], exact_x[0].abs() + exact_y[0].abs())

        for half in (dim // 2, (dim * 7) % (dim // 2 + 1)):
            cosine, sine = (randn(2, 2 * half, dtype=dtype, seed=seed) for seed in (4, 5))
            sizes = (2, 2, dim, half, 2 * stride, stride, 2 * half)
            call(library, "tandem_rotary", x, cosine, sine, out, *sizes, is_bfloat16, one)
            part, cos, sin = (each.double() for each in (x[:, : 2 * half], cosine, sine))
            cos, sin = cos.repeat_interleave(2, 0), sin.repeat_interleave(2, 0)
            turned = torch.cat([-part[:, half:], part[:, :half]], -1)
            assert_close(out[:, : 2 * half], part * cos + turned * sin, (part * cos).abs() + (turned * sin).abs())
            assert torch.equal(out[:, 2 * half :], x[:, 2 * half :])

        tokens = torch.empty(4, dtype=torch.int64)
        call(library, "tandem_greedy", x, tokens, 4, dim, stride, is_bfloat16, one)
        assert tokens.tolist() == [row.index(max(row)) for row in x.tolist()]
        assert bool((whole[:4] == 7).all() and (whole[-4:] == 7).all()), dim
