"""The library as one process sees it."""

from collections.abc import Iterator

import pytest
import torch

from gpu_worker.checkpoint.linear import PackedLinear
from gpu_worker.native import library
from tests.rigs.torch_kernels import torch_kernels


@pytest.fixture
def without_kernels() -> Iterator[None]:
    with torch_kernels():
        yield


@pytest.mark.usefixtures("without_kernels")
def test_kernels_that_are_left_out_are_not_used() -> None:
    assert library.native_library() is None
    linear = torch.nn.Linear(8, 8)
    with torch.inference_mode():
        packed = PackedLinear(linear)
        assert packed._packed.layout is torch._mkldnn
        torch.testing.assert_close(packed(torch.ones(2, 8)), linear(torch.ones(2, 8)))
