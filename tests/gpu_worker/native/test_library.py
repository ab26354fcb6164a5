"""The library as one process sees it."""

from collections.abc import Iterator

import pytest
import torch

from gpu_worker.checkpoint.linear import PackedLinear
from gpu_worker.checkpoint.native_linear import linear_kernel
from gpu_worker.native import library


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "_are_left_out", False)
    library.leave_out_kernels()
    linear_kernel.cache_clear()
    yield
    monkeypatch.undo()
    library.native_library.cache_clear()
    linear_kernel.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_kernels_that_are_left_out_are_not_used() -> None:
    assert library.native_library() is None
    linear = torch.nn.Linear(8, 8)
    with torch.inference_mode():
        packed = PackedLinear(linear)
        assert packed._packed.layout is torch._mkldnn
        torch.testing.assert_close(packed(torch.ones(2, 8)), linear(torch.ones(2, 8)))
