"""The checksum of a page changes with every change of its content."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from gpu_worker.native.library import NativeLibrary
from gpu_worker.shared_pool import guard
from gpu_worker.shared_pool.guard import KernelChecksums, PageChecksums, checksums_of, words_of
from tests.rigs.torch_kernels import torch_kernels

PAGE = 16


@pytest.fixture(params=["kernel", "torch"])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    """What computes the checksums."""
    with nullcontext() if request.param == "kernel" else torch_kernels():
        yield request.param


def checksums(tensors: list[torch.Tensor]) -> PageChecksums:
    return checksums_of(words_of(tensors, PAGE))


def pools(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 5 * PAGE, 8), (3, 5 * PAGE, 24)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_of_the_page_and_no_other_counts(by: str, dtype: torch.dtype) -> None:
    tensors = pools(dtype)
    ours = checksums(tensors)
    assert isinstance(ours, KernelChecksums) == (by == "kernel")
    before = ours.of(range(5))
    assert len(set(before)) == 5
    for tensor in tensors:
        for head in range(tensor.shape[0]):
            for token in range(2 * PAGE, 3 * PAGE):
                for place in range(tensor.shape[2]):
                    kept = tensor[head, token, place].clone()
                    tensor[head, token, place] = kept + 1
                    assert ours.of([2]) != before[2:3]
                    tensor[head, token, place] = kept
    tensors[0][:, PAGE] = 7
    assert ours.of([0, 2, 3, 4]) == [before[page] for page in (0, 2, 3, 4)]
    assert ours.of([1]) != before[1:2]


@pytest.mark.usefixtures("by")
def test_moved_tokens_and_layers_change_it() -> None:
    tensors = pools()
    before = checksums(tensors).of([0])
    assert checksums(tensors[::-1]).of([0]) != before
    tensors[0][:, [0, 1]] = tensors[0][:, [1, 0]]
    assert checksums(tensors).of([0]) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_group", [False, True], ids=["apart", "one tensor"])
def test_the_kernels_of_every_instruction_set_equal_torchs(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_group: bool
) -> None:
    """A worker with other kernels, or without, checks the pages of a dead one."""
    tensors = list(torch.randn(6, 3, 5 * PAGE, 20).to(dtype)) if is_group else pools(dtype)
    monkeypatch.setattr(guard, "native_library", lambda: None)
    exact = checksums(tensors)
    monkeypatch.setattr(guard, "native_library", lambda: library)
    found = checksums(tensors)
    assert isinstance(found, KernelChecksums) and len(found.calls) == (1 if is_group else len(tensors))
    assert found.of(range(5)) == exact.of(range(5)) and not isinstance(exact, KernelChecksums)
