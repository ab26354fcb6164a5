"""The kernel of linear layers: float64, odd sizes, and bits that depend neither on the batch nor on threads."""

import pytest
import torch
from torch import Tensor

from gpu_worker.checkpoint.linear import LinearKernel, kernel_of
from gpu_worker.native.library import NativeLibrary

# Input features, output features: panels and blocks that are full, begun, and one more than full.
SIZES = [(512, 128), (64, 1), (1, 17), (37, 70), (513, 65), (1537, 24), (2050, 130)]
NUM_ROWS = 70
GUARD = 64


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernel(request: pytest.FixtureRequest, library: NativeLibrary) -> LinearKernel:
    found = kernel_of(library, request.param)
    if found is None:
        # Only the set with instructions for pairs of bfloat16 has that kernel.
        assert (request.param, library.instructions == "avx512_bf16") == (torch.bfloat16, False)
        pytest.skip(f"{library.instructions} does not multiply bfloat16")
    return found


def layer(kernel: LinearKernel, num_in: int, num_out: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and b."""
    torch.manual_seed(num_in * 10_000 + num_out)
    sizes = ((num_rows, num_in), (num_out, num_in), (num_out,))
    x, weight, bias = (torch.randn(size).to(kernel.dtype) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_products_are_those_of_float64(kernel: LinearKernel, num_in: int, num_out: int) -> None:
    x, weight, bias = layer(kernel, num_in, num_out, NUM_ROWS)
    packed = kernel.pack(weight)
    assert torch.equal(kernel.unpack(packed, num_out, num_in), weight)
    x64, weight64 = x.double(), weight.double()
    for own_bias in (None, bias):
        exact = torch.nn.functional.linear(x64, weight64, None if own_bias is None else own_bias.double())
        y = kernel.multiply(x, packed, None if own_bias is None else kernel.pack_bias(own_bias), num_out)
        # A chain of n operations in float32 has at most this error (Higham, Accuracy and Stability, section 3.1), and
        # the result is rounded once more.
        allowed = (num_in + 1) * 2.0**-24 * (x64.abs() @ weight64.abs().T + bias.double().abs())
        allowed += torch.finfo(kernel.dtype).eps * exact.abs()
        assert bool(((y.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_a_row_has_the_same_bits_in_every_batch(kernel: LinearKernel, num_in: int, num_out: int) -> None:
    x, weight, bias = layer(kernel, num_in, num_out, 450)
    packed, packed_bias = kernel.pack(weight), kernel.pack_bias(bias)
    alone = torch.cat([kernel.multiply(x[i : i + 1], packed, packed_bias, num_out) for i in range(NUM_ROWS)])
    assert torch.equal(kernel.multiply(x, packed, packed_bias, num_out)[:NUM_ROWS], alone)
    for num_rows in range(1, NUM_ROWS + 1):
        begin = (num_rows * 7) % (NUM_ROWS - num_rows + 1)
        rows = slice(begin, begin + num_rows)
        assert torch.equal(kernel.multiply(x[rows], packed, packed_bias, num_out), alone[rows]), num_rows


@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_a_row_has_the_same_bits_with_every_number_of_threads(kernel: LinearKernel, num_in: int, num_out: int) -> None:
    x, weight, bias = layer(kernel, num_in, num_out, 450)
    packed, packed_bias = kernel.pack(weight), kernel.pack_bias(bias)
    for num_rows in (1, 5, 32, 450):
        one = kernel.multiply(x[:num_rows], packed, packed_bias, num_out)
        for threads in (2, 3, 7):
            y = torch.full_like(one, torch.nan)
            addresses = (part.data_ptr() for part in (x, packed, packed_bias, y))
            kernel.function(*addresses, num_rows, num_in, num_out, threads)
            assert torch.equal(y, one), (num_rows, threads)


@pytest.mark.parametrize("num_in", [64, 37])
def test_values_that_are_not_finite_stay_in_their_row(kernel: LinearKernel, num_in: int) -> None:
    x, weight, _ = layer(kernel, num_in, 70, 8)
    packed = kernel.pack(weight)
    before = kernel.multiply(x, packed, None, 70)
    # The first element of a row follows the last of the row before.
    x[3, 0], x[6, -1] = torch.nan, torch.inf
    after = kernel.multiply(x, packed, None, 70)
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(after[others], before[others])
    assert bool(after[3].isnan().all())
    assert not bool(after[6].isfinite().any())


@pytest.mark.parametrize("num_out", [1, 15, 33, 64, 70])
def test_nothing_is_written_around_the_result(kernel: LinearKernel, num_out: int) -> None:
    x, weight, _ = layer(kernel, 40, num_out, 9)
    packed = kernel.pack(weight)
    memory = torch.full((GUARD + 9 * num_out + GUARD,), 7, dtype=kernel.dtype)
    y = memory[GUARD:-GUARD]
    kernel.function(x.data_ptr(), packed.data_ptr(), None, y.data_ptr(), 9, 40, num_out, 1)
    assert torch.equal(y.view(9, num_out), kernel.multiply(x, packed, None, num_out))
    assert bool((memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all())


def test_no_rows_give_an_empty_result(kernel: LinearKernel) -> None:
    x, weight, _ = layer(kernel, 40, 70, 0)
    assert kernel.multiply(x, kernel.pack(weight), None, 70).shape == (0, 70)


def test_an_input_of_another_type_or_size_is_refused(kernel: LinearKernel) -> None:
    x, weight, _ = layer(kernel, 40, 70, 2)
    packed = kernel.pack(weight)
    with pytest.raises(ValueError, match="float64"):
        kernel.multiply(x.double(), packed, None, 70)
    with pytest.raises(ValueError, match=r"\[2, 20\]"):
        kernel.multiply(x[:, :20], packed, None, 70)
