"""Extreme values, ties and threads in the small operators of every instruction set; test_dimensions.py has the rest."""

from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpu_worker.native.library import NativeLibrary

_TYPES = [torch.float32, torch.bfloat16]
# Of a result: a few roundings of float32, half a unit in the last place of bfloat16.
_ERROR = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
_PADDING = 5
# By number.
ACTIVATIONS = (nn.functional.silu, lambda x: nn.functional.gelu(x, approximate="tanh"))


def call(library: NativeLibrary, name: str, *arguments: Any) -> None:
    """Calls a function with tensors, sizes and floats."""
    types = {Tensor: c_void_p, int: c_int64, float: c_float, bool: c_int32, c_int32: c_int32}
    function = getattr(library.functions, name)
    function.argtypes, function.restype = [types[type(each)] for each in arguments], None
    function(*(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments))


def randn(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, exact: Tensor, terms: Tensor) -> None:
    """The error is within rounding of the terms of each result."""
    error = (found.double() - exact).abs()
    assert bool((error <= _ERROR[found.dtype] * terms.abs() + 1e-30).all()), float((error / terms.abs()).max())


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
@pytest.mark.parametrize("activation", [0, 1], ids=["silu", "gelu_tanh"])
def test_gates_of_any_size_are_finite(library: NativeLibrary, dtype: torch.dtype, activation: int) -> None:
    """The exponential of a large gate is infinite, or zero. NaN stays NaN."""
    sizes = torch.tensor([0, 1e-30, 20, 88, 100, 200, 1e4, 1e20])
    gate = torch.cat([sizes, -sizes, torch.tensor([torch.nan])]).to(dtype).repeat(2)
    up, out, num = torch.ones_like(gate), torch.empty_like(gate), gate.numel()
    arguments = (1, num, num, num, c_int32(activation), c_int32(dtype is torch.bfloat16))
    call(library, "tandem_gated", gate, up, out, *arguments, c_int32(1))
    x, is_number = gate.double(), ~gate.isnan()
    assert_close(out[is_number], ACTIVATIONS[activation](x)[is_number], x[is_number])
    assert bool(out[~is_number].isnan().all())


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 64, 1009])
def test_greedy(library: NativeLibrary, dtype: torch.dtype, vocab_size: int) -> None:
    # Few different values, so that the largest occurs several times.
    logits = (4 * randn(9, vocab_size + _PADDING, dtype=torch.float32)).round().to(dtype)[:, :vocab_size]
    logits[6, vocab_size // 2], logits[7, -1], logits[8, 0] = torch.nan, torch.inf, -torch.inf
    tokens = torch.empty(9, dtype=torch.int64)
    arguments = (9, vocab_size, logits.stride(0), c_int32(dtype is torch.bfloat16), c_int32(1))
    call(library, "tandem_greedy", logits, tokens, *arguments)
    first = [row.index(max(row)) for row in logits[:6].tolist()]
    assert tokens.tolist() == [*first, -1, -1, -1]


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_results_depend_neither_on_threads_nor_on_other_rows(library: NativeLibrary, threads: int) -> None:
    """Rows are divided between threads only if there are many elements."""
    gate, up = (randn(97, 4099, dtype=torch.float32, seed=seed) for seed in (1, 2))
    alone, shared = torch.empty_like(gate), torch.empty_like(gate)
    for out, num in ((alone, 1), (shared, threads)):
        sizes = (97, 4099, gate.stride(0), up.stride(0))
        call(library, "tandem_gated", gate, up, out, *sizes, c_int32(0), c_int32(0), c_int32(num))
    assert torch.equal(alone, shared)
    row = torch.empty(1, 4099)
    call(library, "tandem_gated", gate[50], up[50], row, 1, 4099, 0, 0, c_int32(0), c_int32(0), c_int32(threads))
    assert torch.equal(row[0], alone[50])


def test_not_a_number_stays_in_its_row(library: NativeLibrary) -> None:
    x = randn(3, 70, dtype=torch.float32)
    x[1, 69] = torch.nan
    out = torch.empty_like(x)
    sizes = (1, 3, 70, 0, 70)
    call(library, "tandem_rms_norm", x, torch.ones(70), out, *sizes, 1e-6, c_int32(0), c_int32(1))
    assert out.isnan().all(-1).tolist() == [False, True, False]
    assert bool(out[[0, 2]].isfinite().all())
